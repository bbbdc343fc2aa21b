"""Times the kernels beside torch: `python -m kernels.bench`."""
