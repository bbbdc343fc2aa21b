"""Checks of an engine's settings that depend on each other. All raise `ConfigError`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contract.errors import ConfigError
from engine.contract.kv_events_config import KVEventsConfig
from engine.contract.kv_transfer_config import NATIVE, REMOTE_SCHEMES

if TYPE_CHECKING:
    from engine.contract.engine_config import EngineConfig


def check_media_limits(config: EngineConfig) -> None:
    """Raise `ConfigError` unless each limit is a number of a kind of media."""
    for kind, limit in (config.limit_mm_per_prompt or {}).items():
        is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
        if kind not in ("image", "audio", "video") or not is_count:
            raise ConfigError(
                "limit_mm_per_prompt must give for 'image', 'audio' or 'video' a number from "
                f"0; got {kind!r}: {limit!r}.",
                param="limit_mm_per_prompt",
            )


def check_kv_scales(config: EngineConfig) -> None:
    """Raise `ConfigError` if the file of scales would have no effect."""
    path, cache = config.quantization_param_path, config.kv_cache_dtype
    if path is None:
        return
    why = ""
    if cache == "int8":
        why = "an int8 KV cache finds a scale for each token by itself: leave it out"
    elif cache not in ("fp8", "fp8_e4m3"):
        why = f"it has scales of an e4m3 KV cache: set kv_cache_dtype to fp8, not {cache}"
    elif config.calculate_kv_scales:
        why = "it has the scales of all layers: leave calculate_kv_scales out"
    if why:
        raise ConfigError(
            f"quantization_param_path={path!r} can't be used: {why}.",
            param="quantization_param_path",
        )


def check_kv_tiers(config: EngineConfig) -> None:
    """Raise `ConfigError` for KV tiers and events without effect."""
    if config.preemption_mode == "swap" and not config.swap_space:
        raise ConfigError(
            "preemption_mode='swap' needs a swap_space above 0.", param="preemption_mode"
        )
    if config.kv_offloading_backend != NATIVE and not config.kv_offloading_size:
        raise ConfigError(
            "kv_offloading_backend needs a kv_offloading_size above 0, the bytes that the "
            "folder or store may take.",
            param="kv_offloading_backend",
        )
    if config.ec_transfer_config and not config.kv_offloading_size:
        raise ConfigError(
            "ec_transfer_config needs a kv_offloading_size above 0, the bytes that outputs of "
            "encoders and KV blocks may take.",
            param="ec_transfer_config",
        )
    scheme, separator, _ = config.kv_offloading_backend.partition("://")
    if separator and scheme not in REMOTE_SCHEMES:
        raise ConfigError(
            f"kv_offloading_backend can't be of {scheme}://; URLs begin with "
            f"{', '.join(f'{scheme}://' for scheme in REMOTE_SCHEMES)}.",
            param="kv_offloading_backend",
        )
    if config.only_encodes:
        return  # there are no KV blocks
    events = KVEventsConfig.from_mapping(config.kv_events_config or {})
    if events.publishes and not config.enable_prefix_caching:
        raise ConfigError("kv_events_config needs enable_prefix_caching.", param="kv_events_config")
    if config.kv_offloading_size and not config.enable_prefix_caching:
        raise ConfigError(
            "kv_offloading_size needs enable_prefix_caching.", param="kv_offloading_size"
        )
