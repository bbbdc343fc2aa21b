"""From settings to a model with its weights: which implementation runs it, and loading it."""
