"""The command `kvlease plan`: what it reads, what it shows, and how it finds the planner."""
