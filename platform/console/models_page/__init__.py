"""The pages of models: what is served, what it needs, how it loads, and all its settings."""
