"""What the kernels that read pages ask of blocks and layouts."""
