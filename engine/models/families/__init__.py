"""Architectures by name: data that defines how a config.json becomes a `DecoderSpec`."""
