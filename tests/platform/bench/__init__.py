"""Measures what the control plane costs."""
