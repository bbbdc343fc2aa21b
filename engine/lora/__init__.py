"""LoRA adapters: read, checked, brought to a model's layers, kept in tiers of memory."""
