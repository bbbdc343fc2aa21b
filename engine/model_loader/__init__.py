"""Chooses the implementation of a model and loads it."""
