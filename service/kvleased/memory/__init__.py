"""Memory regions of the daemon: how large they may be, how they are populated and mapped, and what lies in them."""
