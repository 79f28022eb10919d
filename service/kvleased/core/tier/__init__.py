"""What is known of the tiers below: labels, copies in flight, and what they have not got yet."""
