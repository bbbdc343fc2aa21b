"""LoRA adapters: reading, validation, packing for a model's layers, and caching in memory tiers."""
