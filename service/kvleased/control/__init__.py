"""The control process: its start and end, what it warns of, and whether clients find it where it said."""
