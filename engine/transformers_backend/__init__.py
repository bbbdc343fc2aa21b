"""The Transformers bridge: causal language models of `transformers` over the paged KV cache."""
