"""The disk stores: their files, the directory that holds them, and the process that copies to and from them."""
