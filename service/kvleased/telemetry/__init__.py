"""What the daemon tells about itself: logs, events, spans, addresses, and messages to the service manager."""
