"""Layers and other parts that models share."""
