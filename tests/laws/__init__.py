"""Laws that hold over whole histories: simulation with faults, state machines, small worlds, mutations."""
