"""Names of `vllm.v1.metrics`."""
