"""The reference engine itself, asked about random configurations; `make test-vllm` only."""
