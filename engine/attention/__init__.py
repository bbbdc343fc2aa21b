"""Names of `vllm.attention`."""
