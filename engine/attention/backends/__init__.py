"""Names of `vllm.attention.backends`."""
