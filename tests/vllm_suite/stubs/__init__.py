"""What vLLM's test files import, as far as they need it to talk to a server."""
