"""From an `EngineConfig` to a model that is ready to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.ctranslate2 import ctranslate2_folder, is_ctranslate2
from engine.checkpoints.gguf.folder import SUFFIX, find_gguf, gguf_folder
from engine.checkpoints.model_files import apply_overrides, download
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, InvalidRequest, ModelLoadError
from engine.contract.hub_files import is_hub_id
from engine.contract.plugins import io_processor
from engine.distributed.pipeline import PipelineStage
from engine.model_loader.model_impl import BuildRequest, LoadedImpl, build_model, refuse_unknown
from engine.models.decoder import NativeDecoder
from engine.models.encoder_decoder import TextToTextModel
from engine.models.interface import EngineModel, ModelFacts, ModelSpec, SupportsMultiModal
from engine.models.kv_scales import calibrate
from engine.models.registry import check_sizes, load_plugins, read_config
from engine.models.speech.ultravox import PART_MODELS
from engine.models.speech.whisper import WhisperModel
from engine.models.vision.family import VisionDecoder
from engine.multimodal.audio import pads_windows
from engine.multimodal.inputs import split_sampling
from engine.multimodal.processor import MediaProcessor
from engine.pooling.pooler import Pooler
from engine.quantization.report import log_lines as report_lines
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.tokenizer_files import eos_ids, read_generation_config, sampling_defaults
from engine.text.tokenizer_folder import tokenizer_folder
from kernels import KernelSet
from kernels.interface import RankGroup

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """A loaded model and its facts."""

    model: EngineModel
    spec: ModelSpec
    folder: Path
    dtype: torch.dtype
    max_model_len: int
    tokenizer_folder: Path
    #: Whether there is a tokenizer; not with skip_tokenizer_init.
    has_tokenizer: bool
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    load_seconds: float
    #: Set for a model that returns vectors, labels or scores instead of text.
    pooler: Pooler | None = None
    io_processor: str = ""
    #: Processes that share the model; None: this one has all of it.
    ranks: RankGroup | None = None
    #: Its layers among those of several processes; None: it has all of them.
    stage: PipelineStage | None = None
    #: Processes that share its experts alone; None: there are none.
    expert_ranks: RankGroup | None = None

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether a prompt can't be computed in chunks."""
        return self.pooler is not None and self.pooler.settings.encoder

    def read_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, or None if it has none. Doesn't need the loaded weights."""
        return load_tokenizer(self.tokenizer_folder) if self.has_tokenizer else None

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model for the engine core."""
        spec, model = self.spec, self.model
        text = model if isinstance(model, TextToTextModel) else None
        return ModelFacts(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_parameters=spec.num_parameters,
            decode_bytes=getattr(model, "decode_bytes", 0),
            dtype=str(self.dtype).removeprefix("torch."),
            max_model_len=self.max_model_len,
            stateful=model.stateful,
            states_in_blocks=isinstance(model, NativeDecoder) and model.stateful,
            takes_embeds=getattr(model, "takes_embeds", False),
            tokenizer_folder=str(self.tokenizer_folder),
            eos_token_ids=self.eos_token_ids,
            default_sampling=self.default_sampling,
            load_seconds=self.load_seconds,
            pooling=None if self.pooler is None else self.pooler.facts(spec),
            load_report=tuple(getattr(model, "load_report", ())),
            io_processor=self.io_processor,
            sees=isinstance(model, SupportsMultiModal) and not getattr(model, "hears", False),
            hears=getattr(model, "hears", False),
            takes_videos=getattr(model, "takes_videos", False),
            bidirectional_span=getattr(model, "bidirectional_span", 0),
            encoder_length=model.encoder_spec.length if isinstance(model, WhisperModel) else 0,
            num_mels=model.encoder_spec.num_mels if isinstance(model, WhisperModel) else 0,
            max_encoder_tokens=text.text_spec.max_position_embeddings if text else 0,
            decoder_start_ids=text.decoder_start_ids if text else (),
            logits_processors=getattr(model, "logits_processors", ()),
        )


def load_model(
    config: EngineConfig,
    ops: KernelSet,
    progress: Callable[[int, int], None],
    ranks: RankGroup | None = None,
    build: Callable[[BuildRequest], LoadedImpl] = build_model,
    stage: PipelineStage | None = None,
    expert_ranks: RankGroup | None = None,
) -> LoadedModel:
    """Load the model that `config` names, or this rank's share, for the kernels of its device.

    `build` makes the model of a checkpoint; see `Device.build_model`.

    Raises `ModelLoadError` or `ConfigError`.
    """
    started = time.perf_counter()
    load_plugins()
    folder = resolve_folder(config)
    raw = _read_config(folder, config)
    check_sizes(raw)  # overrides may set any
    if raw.get("auto_map") and not config.trust_remote_code:
        log.warning("%s brings Python code of its own (auto_map); it isn't imported.", folder)
    generation = read_generation_config(folder)
    overrides = config.override_generation_config or {}
    defaults = sampling_defaults(
        overrides if config.generation_config == "vllm" else generation | overrides
    )
    order = BuildRequest(
        folder, raw, config, ops, progress, ranks=ranks, stage=stage, expert_ranks=expert_ranks
    )
    try:
        files = tokenizer_folder(config, folder)
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(files)
    except ModelLoadError:
        refuse_unknown(order)  # which would be why it can't be read, and matters more
        raise
    built = build(order)
    _check_pruning(config, built)
    _check_media_options(config, built, files)
    spec = built.spec
    for line in report_lines(getattr(built.model, "load_report", ())):
        log.info("weights: %s", line)
    if config.calculate_kv_scales and not config.only_encodes:
        _measure_kv_scales(built, config, tokenizer)
    return LoadedModel(
        model=built.model,
        spec=spec,
        folder=folder,
        dtype=built.dtype,
        max_model_len=built.max_model_len,
        tokenizer_folder=files,
        has_tokenizer=tokenizer is not None,
        eos_token_ids=tuple(
            eos_ids(
                generation | overrides,
                (*spec.eos_token_ids, tokenizer.eos_token_id if tokenizer else None),
                spec.vocab_size,
            )
        ),
        default_sampling=defaults,
        load_seconds=time.perf_counter() - started,
        pooler=built.pooler,
        io_processor=_io_processor(config, raw, built.pooler),
        ranks=ranks,
        stage=stage,
        expert_ranks=expert_ranks,
    )


def _check_pruning(config: EngineConfig, built: LoadedImpl) -> None:
    """Raise `ConfigError` unless the model's media can be pruned as the config says."""
    for kind in config.pruning_rates:
        if kind not in getattr(built.model, "prunable", ()):
            raise ConfigError(
                f"{kind}_pruning_rate can't be used with {built.spec.architecture}: its {kind}s "
                "have no token for each square of pixels.",
                param=f"{kind}_pruning_rate",
            )


def _check_media_options(config: EngineConfig, built: LoadedImpl, folder: Path) -> None:
    """Raise `ConfigError` for mm_processor_kwargs that the model's processor refuses."""
    options, _ = split_sampling(config.mm_processor_kwargs)
    if isinstance(built.model, WhisperModel):
        try:
            pads_windows(config.mm_processor_kwargs or {})
        except InvalidRequest as error:
            raise ConfigError(error.message, param="mm_processor_kwargs") from error
    if not options or not isinstance(built.model, VisionDecoder):
        return
    if built.model.hears:
        raise ConfigError(
            "mm_processor_kwargs change nothing of audio: leave them out.",
            param="mm_processor_kwargs",
        )
    from PIL import Image

    try:
        MediaProcessor(folder, options=options).prepare(Image.new("RGB", (256, 256)))
    except InvalidRequest as error:
        raise ConfigError(error.message, param="mm_processor_kwargs") from error


def _io_processor(config: EngineConfig, raw: dict[str, Any], pooler: Pooler | None) -> str:
    """Return the name of the model's installed IO processor, or "" if it has none.

    Raises `ConfigError` if it isn't installed, or if the model generates text.
    """
    name = config.io_processor_plugin or raw.get("io_processor_plugin")
    if not isinstance(name, str) or not name:
        return ""
    if pooler is None:
        raise ConfigError("IO processors are for pooling models.", param="io_processor_plugin")
    io_processor(name, config.name)
    return name


def reload_model(
    loaded: LoadedModel,
    config: EngineConfig,
    ops: KernelSet,
    build: Callable[[BuildRequest], LoadedImpl] = build_model,
) -> None:
    """Read the weights again and keep everything else of `loaded`. `build` is that of `load_model`.

    Raises `ModelLoadError` if they can't be read, or have become those of another model.
    """
    raw = _read_config(loaded.folder, config)
    built = build(
        BuildRequest(
            loaded.folder,
            raw,
            config,
            ops,
            lambda done, total: None,
            ranks=loaded.ranks,
            stage=loaded.stage,
            expert_ranks=loaded.expert_ranks,
        )
    )
    if _facts(built.spec, built.max_model_len) != _facts(loaded.spec, loaded.max_model_len):
        raise ModelLoadError(f"{loaded.folder} holds another model by now.")
    if config.calculate_kv_scales and not config.only_encodes:
        _measure_kv_scales(built, config, loaded.read_tokenizer())
    loaded.model, loaded.pooler = built.model, built.pooler


def _facts(spec: ModelSpec, max_model_len: int) -> tuple[object, ...]:
    """Return the facts that the engine core plans with."""
    sizes = spec.vocab_size, spec.hidden_size, spec.num_layers, spec.num_parameters
    return spec.architecture, sizes, tuple(spec.sliding_windows), max_model_len


def _measure_kv_scales(
    built: LoadedImpl, config: EngineConfig, tokenizer: Tokenizer | None
) -> None:
    """Measure the scales of an fp8 KV cache. Raises `ConfigError` if the cache has no scales."""
    name = config.kv_cache_dtype
    if not name.startswith("fp8") or not isinstance(built.model, NativeDecoder):
        raise ConfigError(
            "calculate_kv_scales is for fp8 KV caches of the native decoder; kv_cache_dtype is "
            f"{name}.",
            param="calculate_kv_scales",
        )
    if built.model.stateful or built.model.spec.cross is not None:
        raise ConfigError(
            f"calculate_kv_scales must be false: {built.spec.architecture} carries states or an "
            "encoder's, and its scales aren't measured.",
            param="calculate_kv_scales",
        )
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    calibrate(built.model, tokenizer, built.max_model_len, dtype)


def resolve_folder(config: EngineConfig) -> Path:
    """Return the model's folder, downloading it from the hub if there is no folder of that name.

    For a GGUF file or CTranslate2's layout this is a folder in the cache that contains everything
    but the weights in the usual form.
    """
    if not config.model:
        raise ConfigError("model must name a folder or a hub id.", param="model")
    try:
        folder = Path(config.model).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, or an unknown user's home
        text = f"{config.model[:200]!r} is no path: {error}."
        raise ModelLoadError(text) from error
    if file := find_gguf(folder):
        needs_tokenizer = config.tokenizer is None and not config.skip_tokenizer_init
        return gguf_folder(file, with_tokenizer=needs_tokenizer)
    if is_ctranslate2(folder):
        return ctranslate2_folder(folder)
    if folder.is_dir():
        return folder.resolve()
    if folder.suffix == SUFFIX:
        raise ModelLoadError(f"There is no file {config.model}.")
    if not is_hub_id(config.model):
        raise ModelLoadError(f"There is no folder {config.model}.")
    return download(config)


def _read_config(folder: Path, config: EngineConfig) -> dict[str, Any]:
    """Return config.json with the settings applied. The configurations of models that it names as
    parts are included, and the parts are then named by their folders.
    """
    raw = apply_overrides(read_config(folder), config)
    if raw.get("model_type") != "ultravox":
        return raw
    for name, (part, _) in PART_MODELS.items():
        if model := raw.get(name):
            part_folder = resolve_folder(replace(config, model=str(model), revision=None))
            part_config = read_config(part_folder) | (raw.get(part) or {})
            raw = {**raw, name: str(part_folder), part: part_config}
    return raw
