"""What the daemon tells about itself while it runs: logs, events, and messages to the service manager."""
