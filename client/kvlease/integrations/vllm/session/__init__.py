"""An engine process's link to the daemon: how it attaches, exchanges blocks and keys, and does without a daemon."""
