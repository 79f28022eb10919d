"""kvleased: the daemon that owns the KV memory of a node."""
