"""The adapters: local socket, REST and gRPC; each parses calls, passes them to the daemon, and writes its answers."""
