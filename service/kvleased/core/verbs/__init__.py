"""The verbs that callers ask for, the order in which calls are served, and the ends of leases and workers."""
