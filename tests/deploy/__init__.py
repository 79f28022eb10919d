"""What is deployed, checked by the tools that will read it; `make test-deploy` only."""
