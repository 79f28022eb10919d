"""Who may come in, as whom, and what each may do."""
