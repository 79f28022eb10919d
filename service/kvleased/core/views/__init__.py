"""What people and metrics see of a cache; each view is of one instant."""
