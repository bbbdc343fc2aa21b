"""Names of `vllm.plugins.io_processors`."""
