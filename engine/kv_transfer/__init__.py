"""KV blocks outside the KV cache: connectors, and the tiers of host memory and disk."""
