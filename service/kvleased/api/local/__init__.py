"""The local socket: its listener, its connections, and what goes out over them."""
