"""The settings: what there is, where it is read from, and what is said of what makes no sense."""
