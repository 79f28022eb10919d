"""What a process has of its machine: private directories, descriptors in packets, its heap, turns of the loop."""
