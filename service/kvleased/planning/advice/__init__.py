"""What else could be planned: the settings, what a change would change, and the nearest remedies for a refusal."""
