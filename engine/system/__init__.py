"""The engine's use of the operating system and of Redis."""
