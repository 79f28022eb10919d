"""What the daemon tells about itself: logs, events, addresses, and messages to the service manager."""
