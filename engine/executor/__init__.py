"""Where steps run: loads the model, sizes the KV cache, hands plans to workers."""
