"""Own the shared mode: several engines of one model on one pool, which the daemon rules by the block."""
