"""Remote stores: each kind, when and how it is called, and the process that copies to and from it."""
