"""Pieces that models share."""
