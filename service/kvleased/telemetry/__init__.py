"""What the daemon says of itself: logs, spans, and notes to whoever started it."""
