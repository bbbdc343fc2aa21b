"""What became of each request: kept for a while, found by any id that a client has seen."""
