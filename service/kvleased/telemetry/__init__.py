"""What the daemon tells about itself: logs, spans, addresses, and messages to the service manager."""
