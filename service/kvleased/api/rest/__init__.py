"""REST: the table of routes, what describes it, and HTTP as uvicorn speaks it here, probes and metrics included."""
