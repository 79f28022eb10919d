"""Servers that remote stores are tested with: real ones, and one that does what no good server does."""
