"""REST: the table of routes, its description, and HTTP as uvicorn speaks it here, with probes and metrics."""
