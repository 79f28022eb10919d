"""What is cached of a prompt: the search in all tiers, and why blocks were not found."""
