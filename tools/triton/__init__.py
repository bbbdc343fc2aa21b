"""Ahead-of-time compilation of Triton kernels, and tuning of their tiles."""
