"""Triton's kernels compiled ahead, and their tiles tuned."""
