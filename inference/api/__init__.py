"""Endpoint families, each in its own files."""
