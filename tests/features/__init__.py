"""Pairs break, not features: every two features together, and the page that says how they go."""
