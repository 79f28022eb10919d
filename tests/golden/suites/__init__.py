"""One module per suite: it answers the reference's operations with our functions."""
