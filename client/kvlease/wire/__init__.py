"""How calls, answers and errors are written for their way: JSON bodies, frames, the protocol's errors, traceparents."""
