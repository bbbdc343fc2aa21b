"""Names of `vllm.plugins.io_processors.interface`."""

from engine.contract.plugins import IOProcessor

__all__ = ["IOProcessor"]
