"""What becomes of copies when they end or fail, and of the stores when they stop and come back."""
