"""What is found of a prompt: the search in all tiers, and what is told of what was not found."""
