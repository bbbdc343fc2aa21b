"""Triton kernels for GPUs; under TRITON_INTERPRET=1 they run on CPU tensors, slowly."""
