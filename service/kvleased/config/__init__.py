"""The settings: which there are, where they are read from, and what is said of wrong ones."""
