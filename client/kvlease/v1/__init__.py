"""Messages and stubs generated from `proto/kvlease/v1`; `make proto` writes them anew."""
