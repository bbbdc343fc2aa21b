"""Names of `vllm.v1.sample`."""
