"""Checkpoints that were quantised beforehand: what each format keeps, and what it means."""
