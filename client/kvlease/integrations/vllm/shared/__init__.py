"""Own the shared mode: several engines of one model serve from one pool, and the daemon decides who has which block."""
