"""Formats of quantized checkpoints: their tensors, and what these mean."""
