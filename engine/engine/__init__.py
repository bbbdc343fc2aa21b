"""Names of `vllm.engine`."""
