"""Tests of deployed files with the tools that will read them; `make test-deploy` only."""
