"""Names of `vllm.model_executor`."""
