"""From an `EngineConfig` to a model that is ready to run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kernels
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.generation_config import eos_ids, read_generation_config, sampling_defaults
from engine.layers.rotary import RopeSpec
from engine.models.decoder import NativeDecoder
from engine.models.encoders.encoder import NativeEncoder
from engine.models.encoders.spec import EncoderSpec
from engine.models.registry import decoder_spec, read_config
from engine.models.spec import DecoderSpec
from engine.models.weights import DummyWeights, WeightReader
from engine.pooling.load import load_pooled, pooled_spec
from engine.pooling.pooler import Pooler
from engine.pooling.settings import pooling_settings
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.tokenizer_folder import tokenizer_folder

log = logging.getLogger(__name__)

_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


@dataclass(slots=True)
class LoadedModel:
    """A model, and what the rest of the engine must know of it."""

    model: NativeDecoder | NativeEncoder
    spec: DecoderSpec | EncoderSpec
    folder: Path
    dtype: torch.dtype
    max_model_len: int
    #: None with skip_tokenizer_init.
    tokenizer: Tokenizer | None
    tokenizer_folder: Path
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    load_seconds: float
    #: Of a model that gives vectors, labels or scores instead of text.
    pooler: Pooler | None = None

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether a prompt can't be computed in chunks."""
        return self.pooler is not None and self.pooler.settings.encoder


def load_model(config: EngineConfig, progress: Callable[[int, int], None]) -> LoadedModel:
    """Load the model that `config` names. Raises `ModelLoadError` or `ConfigError`."""
    started = time.perf_counter()
    folder = resolve_folder(config)
    raw = _with_overrides(read_config(folder), config)
    _refuse_custom_code(raw, config, folder)
    pooling = pooling_settings(config, folder, raw)
    spec = decoder_spec(raw) if pooling is None else pooled_spec(pooling, raw)
    generation = read_generation_config(folder)
    files = tokenizer_folder(config, folder)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(files)
    max_model_len = _max_model_len(spec, config, pooling.max_length if pooling else None)
    if config.disable_sliding_window and isinstance(spec, DecoderSpec):
        spec = dataclasses.replace(spec, windows=(0,) * spec.num_layers)
    dtype = _resolve_dtype(config.dtype, spec.dtype)
    model: NativeDecoder | NativeEncoder
    pooler = None
    if pooling is not None or isinstance(spec, EncoderSpec):
        model, pooler = load_pooled(pooling, spec, folder, config, dtype, max_model_len, progress)
    else:
        model = NativeDecoder(
            spec, kernels.get("cpu", use_compiled=config.cpu_kernels), dtype, max_model_len
        )
        weights = DummyWeights() if config.load_format == "dummy" else WeightReader(folder)
        model.load(weights, progress)
        if unread := weights.unread():
            log.warning("%d tensors of the checkpoint weren't used: %s", len(unread), unread[:5])
        weights.close()
    return LoadedModel(
        model=model,
        spec=spec,
        folder=folder,
        dtype=dtype,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        tokenizer_folder=files,
        eos_token_ids=tuple(
            eos_ids(
                generation,
                (*spec.eos_token_ids, tokenizer.eos_token_id if tokenizer else None),
                spec.vocab_size,
            )
        ),
        default_sampling=(
            {} if config.generation_config == "vllm" else sampling_defaults(generation)
        ),
        load_seconds=time.perf_counter() - started,
        pooler=pooler,
    )


def resolve_folder(config: EngineConfig) -> Path:
    """The model's folder; a hub id is downloaded when no such folder is there."""
    if not config.model:
        raise ConfigError("model must name a folder or a hub id.", param="model")
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or config.model.count("/") != 1 or config.model.startswith("."):
        raise ModelLoadError(f"There is no folder {config.model}.", param="model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        path = snapshot_download(
            config.model,
            revision=config.revision,
            cache_dir=config.download_dir,
            allow_patterns=patterns,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{config.model} is no folder here and couldn't be downloaded: {error}", param="model"
        ) from error
    return Path(path)


def _with_overrides(raw: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """config.json with `rope_scaling` and `rope_theta` of the engine's settings."""
    if config.rope_scaling is not None:
        theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta")
        raw = {**raw, "rope_scaling": config.rope_scaling, "rope_parameters": None}
        raw["rope_theta"] = theta
    if config.rope_theta is not None:
        raw = {**raw, "rope_theta": config.rope_theta}
        if raw.get("rope_parameters"):
            raw["rope_parameters"] = {**raw["rope_parameters"], "rope_theta": config.rope_theta}
    return raw


def _refuse_custom_code(raw: dict[str, Any], config: EngineConfig, folder: Path) -> None:
    """A folder that brings its own code runs only on the operator's word."""
    if raw.get("auto_map") and not config.trust_remote_code:
        log.warning("%s brings Python code of its own (auto_map); it isn't imported.", folder)


def _resolve_dtype(wanted: str, checkpoint: str) -> torch.dtype:
    """In which dtype weights are kept. `auto`: the checkpoint's."""
    name = checkpoint.removeprefix("torch.") if wanted == "auto" else wanted
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ModelLoadError(f"config.json: dtype {checkpoint!r} isn't supported.", param="dtype")
    return dtype


def derived_max_len(spec: DecoderSpec | EncoderSpec) -> int:
    """The longest context that the checkpoint is made for, rope scaling included."""
    rope: RopeSpec | None = spec.rope
    length = spec.max_position_embeddings
    if rope is None:
        return length
    factor = float(rope.params.get("factor") or 1.0)
    if rope.kind in ("linear", "dynamic"):
        return int(length * factor)
    if rope.kind == "yarn":
        original = rope.params.get("original_max_position_embeddings") or length
        return max(length, int(original * factor))
    return length


def _max_model_len(
    spec: DecoderSpec | EncoderSpec, config: EngineConfig, default: int | None = None
) -> int:
    """What the operator says, else `default`; never over what the checkpoint is made for."""
    derived = derived_max_len(spec)
    windows = [window for window in spec.windows if window]
    if config.disable_sliding_window and windows:
        derived = min(derived, *windows)
    if config.max_model_len is None:
        return min(derived, default or derived)
    if config.max_model_len > derived:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) is over the model's context ({derived}).",
            param="max_model_len",
        )
    return config.max_model_len
