"""One module per suite: operations of the reference, answered by our functions."""
