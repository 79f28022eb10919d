"""Memory that the daemon shares with a process: how it is mapped, on a GPU too, and what becomes of it in a fork."""
