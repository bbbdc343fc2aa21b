"""`/v1/files`: what clients upload, and what batches write for them."""
