"""Architectures by name: each is data that says how its config.json becomes a `DecoderSpec`."""
