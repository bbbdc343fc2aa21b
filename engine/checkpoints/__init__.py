"""A model's files: locating them, and reading their tensors."""
