"""`KVTransferConfig`: the connector that saves and loads KV blocks; vLLM's names. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from engine.contract.errors import ConfigError

#: The connector to host memory and to a folder.
OFFLOADING_CONNECTOR = "OffloadingConnector"
KV_ROLES = ("kv_both", "kv_producer", "kv_consumer")
#: Where offloaded blocks lie: host memory, or else a folder.
NATIVE = "native"
PREEMPTION_MODES = ("recompute", "swap")
_PARAM = "kv_transfer_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Settings of a connector. Raises `ConfigError` for a value out of its range.

    Attributes:
        kv_connector: class name; `OffloadingConnector`, or a class of `kv_connector_module_path`.
        kv_role: kv_producer only saves blocks, kv_consumer only loads them, kv_both does both.
        kv_connector_module_path: importable module of a connector that isn't Quire's.
        kv_connector_extra_config: settings of the connector.
        kv_load_failure_policy: recompute: tokens whose blocks can't be loaded are computed.
    """

    kv_connector: str = OFFLOADING_CONNECTOR
    kv_role: str = "kv_both"
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = "recompute"

    @property
    def saves(self) -> bool:
        """Whether blocks are saved."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded."""
        return self.kv_role != "kv_producer"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON. Raises `ConfigError`."""
        names = {spec.name for spec in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in names:
                raise ConfigError(f"{_PARAM} has no {name!r}: {sorted(names)}.", param=_PARAM)
            if name == "kv_connector_extra_config":
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{name} must be a JSON object; got {value!r}.", param=_PARAM)
            elif not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a string; got {value!r}.", param=_PARAM)
        config = cls(**values)
        if config.kv_role not in KV_ROLES:
            raise ConfigError(
                f"kv_role must be one of {', '.join(KV_ROLES)}; got {config.kv_role!r}.",
                param=_PARAM,
            )
        if config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy must be recompute: a block that can't be loaded is always "
                f"computed; got {config.kv_load_failure_policy!r}.",
                param=_PARAM,
            )
        if config.kv_connector == OFFLOADING_CONNECTOR:
            if config.kv_connector_extra_config:
                raise ConfigError(
                    f"{OFFLOADING_CONNECTOR} has no kv_connector_extra_config: use "
                    "kv_offloading_size, kv_offloading_backend and swap_space.",
                    param=_PARAM,
                )
        elif config.kv_connector_module_path is None:
            raise ConfigError(
                f"kv_connector={config.kv_connector!r} needs kv_connector_module_path, the module "
                f"of its class. Of Quire is {OFFLOADING_CONNECTOR}.",
                param=_PARAM,
            )
        return config


def check_kv_transfer(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a `kv_transfer_config` that can't be used; {} means none."""
    if values:
        KVTransferConfig.from_mapping(values)
