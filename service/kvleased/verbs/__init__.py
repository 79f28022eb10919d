"""The verbs: each checks its request, asks the core, and turns the core's reply into the verb's response."""
