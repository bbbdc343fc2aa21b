"""Weights in few bits: which layers get them, and how they reach the kernels."""
