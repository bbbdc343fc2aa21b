"""Names of `vllm.model_executor.model_loader`."""
