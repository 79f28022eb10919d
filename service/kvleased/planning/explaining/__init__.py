"""How a plan explains its numbers: terms, notes, the account of waste, and the report."""
