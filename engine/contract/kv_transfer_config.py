"""Settings of connectors that save and load KV blocks and encoder outputs; vLLM's names.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from engine.contract.command_line import JsonSettings, bounded

#: The connector to host memory and to folders.
OFFLOADING_CONNECTOR = "OffloadingConnector"
#: Combines the connectors that `connectors` in its `kv_connector_extra_config` lists.
MULTI_CONNECTOR = "MultiConnector"
#: The connector that reads other replicas' KV caches by the package nixl, and what its
#: `kv_connector_extra_config` may say.
NIXL_CONNECTOR = "NixlConnector"
NIXL_DEFAULTS: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "backends": ["UCX"]}
#: By vLLM's name of a connector whose package has it: module and class.
PACKAGED_CONNECTORS = {
    "LMCacheConnectorV1": (
        "lmcache.integration.vllm.lmcache_connector_v1",
        "LMCacheConnectorV1Dynamic",
    ),
    "MooncakeConnector": ("mooncake.mooncake_connector_v1", "MooncakeConnector"),
}
KV_BOTH, KV_PRODUCER, KV_CONSUMER = "kv_both", "kv_producer", "kv_consumer"
KV_ROLES = (KV_BOTH, KV_PRODUCER, KV_CONSUMER)
#: Storage of offloaded blocks: host memory, or else a folder, a store with one of these URLs, or
#: each replica's memory, which others read at tcp://HOST:PORT.
NATIVE = "native"
PEER_SCHEME = "tcp"
REMOTE_SCHEMES = ("redis", "rediss", "unix", "s3", PEER_SCHEME)
LOAD_FAILURE_POLICIES = ("recompute", "fail")
PREEMPTION_MODES = ("recompute", "swap")
#: The connector that saves and loads encoder outputs.
EC_CONNECTOR = "ECConnector"
EC_BOTH, EC_PRODUCER, EC_CONSUMER = "ec_both", "ec_producer", "ec_consumer"
EC_ROLES = (EC_BOTH, EC_PRODUCER, EC_CONSUMER)


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig(JsonSettings):
    """Settings of a connector.

    Attributes:
        kv_connector: class name; `OffloadingConnector`, `MultiConnector`, `NixlConnector`, one of
            `PACKAGED_CONNECTORS`, or a class of `kv_connector_module_path`.
        kv_role: kv_producer only saves blocks, kv_consumer only loads them, kv_both does both.
        kv_connector_module_path: importable module of a connector that isn't Quire's.
        kv_connector_extra_config: settings of the connector.
        kv_load_failure_policy: for a request whose blocks can't be loaded. recompute: they are
            computed; fail: it ends with an error.
    """

    PARAM = "kv_transfer_config"

    kv_connector: str = OFFLOADING_CONNECTOR
    kv_role: str = bounded(KV_BOTH, choices=KV_ROLES)
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = bounded("recompute", choices=LOAD_FAILURE_POLICIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_connector == MULTI_CONNECTOR:
            self._check_connectors()
        elif self.kv_connector == OFFLOADING_CONNECTOR:
            if self.kv_connector_extra_config:
                raise self.error(
                    f"{OFFLOADING_CONNECTOR} has no kv_connector_extra_config: use "
                    "kv_offloading_size, kv_offloading_backend and swap_space."
                )
        elif self.is_nixl:
            for name, value in self.kv_connector_extra_config.items():
                if not isinstance(value, type(NIXL_DEFAULTS.get(name))):
                    raise self.error(
                        f"{NIXL_CONNECTOR}'s kv_connector_extra_config may say host, port and "
                        f"backends (a list); got {name}={value!r}."
                    )
        elif not all(self.class_path):
            raise self.error(
                f"kv_connector={self.kv_connector!r} needs kv_connector_module_path, the module "
                f"of its class. Of Quire are {OFFLOADING_CONNECTOR}, {NIXL_CONNECTOR} and "
                f"{MULTI_CONNECTOR}."
            )

    @property
    def saves(self) -> bool:
        """Whether blocks are saved."""
        return self.kv_role != KV_CONSUMER

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded."""
        return self.kv_role != KV_PRODUCER

    @property
    def class_path(self) -> tuple[str, str]:
        """Module and class of a connector that isn't Quire's; "" for an unknown module."""
        if self.kv_connector_module_path is not None:
            return self.kv_connector_module_path, self.kv_connector
        return PACKAGED_CONNECTORS.get(self.kv_connector, ("", self.kv_connector))

    @property
    def is_nixl(self) -> bool:
        """Whether it is Quire's connector to NIXL."""
        return self.kv_connector == NIXL_CONNECTOR and self.kv_connector_module_path is None

    @property
    def connectors(self) -> list[Self]:
        """Settings of a `MultiConnector`'s connectors, with its role."""
        return [
            self.from_mapping({"kv_role": self.kv_role, **values})
            for values in self.kv_connector_extra_config["connectors"]
        ]

    def _check_connectors(self) -> None:
        values = self.kv_connector_extra_config
        connectors = values.get("connectors")
        if (
            set(values) != {"connectors"}
            or not (isinstance(connectors, list) and connectors)
            or not all(isinstance(connector, Mapping) for connector in connectors)
        ):
            raise self.error(
                f"{MULTI_CONNECTOR} needs a kv_connector_extra_config of connectors alone, a list "
                f"of JSON objects as kv_transfer_config is one; got {values!r}."
            )
        names = [connector.kv_connector for connector in self.connectors]
        if MULTI_CONNECTOR in names or names.count(OFFLOADING_CONNECTOR) > 1:
            raise self.error(
                f"{MULTI_CONNECTOR} can have one {OFFLOADING_CONNECTOR} and no {MULTI_CONNECTOR}; "
                f"got {', '.join(names)}."
            )
        if any("kv_load_failure_policy" in connector for connector in connectors):
            raise self.error(
                f"kv_load_failure_policy is of a {MULTI_CONNECTOR}, not of its connectors."
            )


@dataclass(frozen=True, kw_only=True)
class ECTransferConfig(JsonSettings):
    """Settings of the connector for encoder outputs.

    Attributes:
        ec_connector: `ECConnector`, to the tiers of `kv_offloading_backend`.
        ec_role: ec_producer only saves outputs, ec_consumer only loads them, ec_both does both.
    """

    PARAM = "ec_transfer_config"

    ec_connector: str = bounded(EC_CONNECTOR, choices=(EC_CONNECTOR,))
    ec_role: str = bounded(EC_BOTH, choices=EC_ROLES)

    @property
    def saves(self) -> bool:
        """Whether outputs are saved."""
        return self.ec_role != EC_CONSUMER

    @property
    def loads(self) -> bool:
        """Whether outputs are loaded."""
        return self.ec_role != EC_PRODUCER
