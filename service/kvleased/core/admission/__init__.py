"""Where room comes from, and what is granted or refused, with every number that a refusal tells."""
