"""`EPLBConfig`: how experts are balanced over ranks; vLLM's names. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.errors import ConfigError

_PARAM = "eplb_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class EPLBConfig:
    """Settings of the balancer. Raises `ConfigError` for a value out of range.

    Attributes:
        num_redundant_experts: additional copies of experts in each layer; >= 0.
        step_interval: number of steps after which a layer's experts are placed anew; >= 1.
        window_size: number of the last of these steps whose tokens count; in [1, step_interval].
    """

    num_redundant_experts: int = 0
    step_interval: int = 3000
    window_size: int = 1000

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON. Raises `ConfigError`."""
        names = {spec.name for spec in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in names:
                raise ConfigError(f"{_PARAM} has no {name!r}: {sorted(names)}.", param=_PARAM)
            low = 0 if name == "num_redundant_experts" else 1
            if type(value) is not int or value < low:
                raise ConfigError(
                    f"{_PARAM}: {name} must be a whole number of at least {low}; got {value!r}.",
                    param=_PARAM,
                )
        config = cls(**{"window_size": min(1000, values.get("step_interval", 3000)), **values})
        if config.window_size > config.step_interval:
            raise ConfigError(
                f"{_PARAM}: window_size must be in [1, step_interval = {config.step_interval}]; "
                f"got {config.window_size}.",
                param=_PARAM,
            )
        return config
