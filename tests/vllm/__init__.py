"""Comparisons with the reference engine over random configurations; `make test-vllm` only."""
