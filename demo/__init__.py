"""The demo model: a small chat model that Quire ships, and everything that made it."""
