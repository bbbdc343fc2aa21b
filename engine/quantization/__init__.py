"""Quantized weights: which layers are quantized, and how weights are converted for the kernels."""
