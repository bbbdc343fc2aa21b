"""What one request is: data, no Redis, no HTTP."""
