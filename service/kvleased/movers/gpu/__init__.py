"""What is only for memory of a GPU: copies there, the process that makes them, and the asking for memory."""
