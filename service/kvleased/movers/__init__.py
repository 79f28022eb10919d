"""Movers: the process that carries out copies, and the daemon's end of its link."""
