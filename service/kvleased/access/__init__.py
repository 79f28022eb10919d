"""Who may call the daemon, in which role, and what each role may do."""
