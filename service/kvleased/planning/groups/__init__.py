"""Which layers share a block table, and how pages of different bytes are made equal."""
