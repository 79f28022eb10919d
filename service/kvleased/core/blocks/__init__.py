"""The blocks of one tier: their states, the index of their keys, and the records of them that outlive a crash."""
