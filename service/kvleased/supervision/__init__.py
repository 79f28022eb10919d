"""The process that owns memory and children: how it starts them, and how it knows of their ends."""
