"""What people and metrics see of a cache: each of one instant."""
