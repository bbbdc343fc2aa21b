"""Runs the engine's steps: loads the model, sizes the KV cache, sends plans to workers."""
