"""Names of `vllm.v1.attention.backends.registry`."""

from enum import StrEnum

from kernels.attention.registry import BACKENDS, register_backend

__all__ = ["AttentionBackendEnum", "register_backend"]

#: The registered backends; a member may stand wherever a backend's name may.
AttentionBackendEnum = StrEnum("AttentionBackendEnum", {name: name for name in BACKENDS})  # type: ignore[misc]
