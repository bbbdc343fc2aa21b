"""Models: one native decoder described by data, and the registry of architectures."""
