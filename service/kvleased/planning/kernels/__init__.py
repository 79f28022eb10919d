"""What the kernels that read pages require of blocks and layouts."""
