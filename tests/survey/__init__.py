"""Proof by running: a tiny random model of each architecture, engine against `transformers`."""
