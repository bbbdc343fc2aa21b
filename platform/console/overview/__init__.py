"""The overview: what happens now, and what happened."""
