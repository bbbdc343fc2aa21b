"""Names of `vllm.v1.attention`."""
