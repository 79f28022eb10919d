"""What each tenant may have of the device pool, and who has what."""
