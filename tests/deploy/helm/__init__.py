"""The chart, rendered by the real Helm SDK in a process of its own."""
