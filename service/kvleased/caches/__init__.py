"""Caches, their workers and lower tiers, as the daemon knows them; what happens to blocks is the business of cores."""
