"""What the engine asks of the machine and of Redis."""
