"""Writes the conversations that the demo model is trained on, and its held-out questions."""
