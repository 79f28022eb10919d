"""The process that owns memory and children: how it starts its children, and how it learns of their ends."""
