"""Rendering of the chart by the real Helm SDK in a process of its own."""
