"""The local socket: its listener, its connections, and their output."""
