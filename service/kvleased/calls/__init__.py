"""What all calls have in common: how arguments are checked, answers remembered, and calls refused while draining."""
