"""Turns messages and texts into token ids without blocking the event loop."""
