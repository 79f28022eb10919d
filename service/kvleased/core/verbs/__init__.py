"""What callers ask for, verb by verb; whose turn it is; and what becomes of leases by it."""
