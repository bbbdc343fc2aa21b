"""A model's files: where they are and how their tensors are read."""
