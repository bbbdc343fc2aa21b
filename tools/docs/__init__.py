"""Generators of pages in docs/."""
