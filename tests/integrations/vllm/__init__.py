"""The reference engine itself as a client of a real daemon; `make test-vllm` only."""
