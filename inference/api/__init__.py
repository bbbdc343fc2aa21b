"""Endpoint families, each in files of its own."""
