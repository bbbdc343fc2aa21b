"""The demo model that sees, and everything that made it."""
