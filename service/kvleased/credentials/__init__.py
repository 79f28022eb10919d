"""What the daemon is known by, and knows others by: the tokens it has read, its root secret, certificates."""
