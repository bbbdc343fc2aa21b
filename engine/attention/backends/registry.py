"""Names of `vllm.attention.backends.registry`."""

from engine.v1.attention.backends.registry import AttentionBackendEnum, register_backend

__all__ = ["AttentionBackendEnum", "register_backend"]
