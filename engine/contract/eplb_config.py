"""`EPLBConfig`: how experts are balanced over ranks; vLLM's names. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.command_line import JsonSettings, bounded


@dataclass(frozen=True, kw_only=True)
class EPLBConfig(JsonSettings):
    """Settings of the balancer.

    Attributes:
        num_redundant_experts: additional copies of experts in each layer.
        step_interval: number of steps after which a layer's experts are placed anew.
        window_size: number of the last of these steps whose tokens count; at most `step_interval`.
    """

    PARAM = "eplb_config"

    num_redundant_experts: int = bounded(0, low=0)
    step_interval: int = bounded(3000, low=1)
    window_size: int = bounded(1000, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_size > self.step_interval:
            raise self.error(
                f"window_size must be in [1, step_interval = {self.step_interval}]; got "
                f"{self.window_size}."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON; a `step_interval` below 1000 is the default of `window_size`."""
        interval = values.get("step_interval")
        short = {"window_size": interval} if isinstance(interval, int) and interval < 1000 else {}
        return super().from_mapping({**short, **values})
