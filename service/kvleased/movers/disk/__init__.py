"""The disk stores: their files, the directory that they lie in, and the process that copies to and from them."""
