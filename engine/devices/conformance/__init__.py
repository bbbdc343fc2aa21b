"""A device's conformance: `python -m engine.devices.conformance DEVICE` runs the checks."""
