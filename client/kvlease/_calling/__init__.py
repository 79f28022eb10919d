"""How a call is made: what is sent, what its answer or its failure means, and when it is tried again."""
