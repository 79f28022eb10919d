"""What is known of leases: their phases, places and rows, who shares each, and how many each tenant has."""
