"""The management API below `/api/`: the console's functions for programs, with DRF."""
