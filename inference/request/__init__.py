"""Data of one request: no Redis, no HTTP."""
