"""What only memory of a GPU needs: copies there, the process that makes them, and requests for memory."""
