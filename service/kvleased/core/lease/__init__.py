"""What is known of leases: their phases, places and rows, which ranks share each, and how many each tenant has."""
