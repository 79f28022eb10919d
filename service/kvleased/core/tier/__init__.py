"""What is known of copies between tiers: labels, copies in flight, and blocks that are still to be copied down."""
