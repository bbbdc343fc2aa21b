"""`LoRAConfig`: an engine's settings of adapters by the names that vLLM has for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.config import EngineConfig


@dataclass(frozen=True)
class LoRAConfig:
    """Of adapters; None where the settings set no bound."""

    max_loras: int | None
    max_lora_rank: int | None
    max_cpu_loras: int | None

    @classmethod
    def of(cls, config: EngineConfig) -> LoRAConfig | None:
        """None where there are no adapters."""
        if not config.enable_lora:
            return None
        return cls(config.max_loras, config.max_lora_rank, config.max_cpu_loras)
