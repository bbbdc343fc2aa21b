"""Names of `vllm.inputs.registry`."""

from engine.multimodal.registry import (
    DummyDataFactory,
    InputContext,
    InputProcessor,
    InputRegistry,
)

__all__ = ["DummyDataFactory", "InputContext", "InputProcessor", "InputRegistry"]
