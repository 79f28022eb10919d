"""The ways in: the local socket, REST and gRPC; each parses, calls the daemon and writes what it answers."""
