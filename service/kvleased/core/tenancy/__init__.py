"""What each tenant may have of the device pool, and which blocks it has."""
