"""What `kvlease plan --vllm` knows of vLLM: its arguments, and what it chooses where they leave something open."""
