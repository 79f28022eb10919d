"""Own the bridges from kvlease to inference engines; each module imports its engine, so import only the one you use."""
