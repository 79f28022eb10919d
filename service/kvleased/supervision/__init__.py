"""The process that owns memory and children: their starts and ends, and the descriptors that it keeps for them."""
