"""Times the kernels beside torch: `python -m benchmarks.kernels`."""
