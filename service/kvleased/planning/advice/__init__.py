"""What else could be planned: the settings, what a change would change, and the nearest way out of a refusal."""
