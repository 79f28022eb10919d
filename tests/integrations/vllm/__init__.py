"""Tests with the reference engine as a client of a real daemon; `make test-vllm` only."""
