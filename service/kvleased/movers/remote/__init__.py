"""Remote stores: each kind, how it is called and when it is left alone, and the process that copies to and from it."""
