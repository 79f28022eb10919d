"""gRPC: kvlease's service, the standard services beside it, and the checks of calls and connections."""
