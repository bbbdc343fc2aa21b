"""Measures what the gateway itself costs. Run `python -m tests.inference.bench --help`."""
