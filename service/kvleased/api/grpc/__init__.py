"""gRPC: kvlease's service, what stands beside it, and what a call and a connection must pass before."""
