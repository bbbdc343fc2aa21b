"""Chooses a checkpoint's implementation: native decoder, Transformers bridge or external class."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

import kernels
from engine.checkpoints.gguf.folder import source_of
from engine.checkpoints.load_format import open_weights
from engine.checkpoints.safetensors import WeightReader, check_dummy_size
from engine.contract.checkpoint_options import CHECKPOINT_METHODS, ONLINE_METHODS
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import BadModelConfig, ConfigError, ModelLoadError
from engine.distributed.parallel_state import CONTEXT_PARAM, DATA_PARAM, PIPELINE_PARAM
from engine.distributed.pipeline import PipelineStage
from engine.models.attention_backend import with_attention_backend
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec, drop_mtp_weights
from engine.models.encoder_decoder import TextToTextModel, read_start_ids
from engine.models.families.text_to_text import text_encoder_spec
from engine.models.forward_context import KVScales
from engine.models.interface import EngineModel, ModelSpec
from engine.models.kv_scales import PARAM as KV_SCALE_PARAM
from engine.models.kv_scales import read_kv_scale_file, read_kv_scales
from engine.models.registry import ModelRegistry, decoder_spec, has_native_decoder, is_transformers
from engine.models.rotary_embedding import RopeSpec
from engine.models.sharding import PARAM, ExpertShard
from engine.models.speech.alignment import read_alignment_heads
from engine.models.speech.whisper import WhisperEncoderSpec, WhisperModel
from engine.models.vision.dual_encoder import DualEncoderSpec
from engine.models.vision.family import VisionDecoder, VisionFamily, locate_text
from engine.models.vision.registry import find_vision_family
from engine.pooling.load import load_pooled, pooled_spec
from engine.pooling.pooler import Pooler
from engine.pooling.pooling_config import PoolingModelConfig, read_pooling_config
from engine.quantization.formats.base import CheckpointFormat
from engine.quantization.formats.fp4 import quantization_of
from engine.quantization.formats.registry import find_format, quantization_config_of
from engine.quantization.online import CODE_FORMATS
from engine.quantization.packing import make_quant_scheme
from engine.text.tokenizer_files import parse_object, read_generation_config, read_text
from kernels import KernelSet
from kernels.interface import RankGroup

#: ModelOpt's own file. Its older checkpoints have this instead of `quantization_config`.
MODELOPT_FILE = "hf_quant_config.json"
#: Files from before `quantization_config`. They don't name the method, so the operator must.
_OLD_FILES = {
    "awq": ("quant_config.json", "quantize_config.json"),
    "gptq": ("quantize_config.json",),
}
#: Formats whose weights may already be 8-bit floats; `quantization="fp8"` then just confirms it.
_EIGHT_BIT_FLOATS = ("fp8", "modelopt", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """How a checkpoint was quantized, and how it is quantized at load.

    Attributes:
        form: the checkpoint's own format; None for plain weights and GGUF files.
        rounds: the method that rounds weights while they load, if any.
    """

    form: CheckpointFormat | None
    rounds: str | None


def resolve_quantization(
    folder: Path, raw: dict[str, Any], config: EngineConfig
) -> QuantizationPlan:
    """Return the plan for a model folder and its config.json.

    Raises `ModelLoadError` for an unsupported format, and `ConfigError` if `quantization` names
    a format other than the checkpoint's.
    """
    form = find_format(_read_quantization_config(folder, raw, config.quantization))
    asked = config.quantization
    if asked is None:
        return QuantizationPlan(form, None)
    name = _name(form, folder)
    if asked in ONLINE_METHODS and not (asked == "fp8" and name in _EIGHT_BIT_FLOATS):
        return QuantizationPlan(form, asked)
    if asked == "bitsandbytes" and not name:
        return QuantizationPlan(None, "nf4")
    if name not in CHECKPOINT_METHODS.get(asked, (asked,)) and asked != "fp8":
        theirs = f"was quantized by {name}" if name else "isn't quantized"
        raise ConfigError(
            f"quantization={asked!r} names a format of checkpoints, but this one {theirs}. Leave "
            "it out to take the checkpoint as it is; int8 and int4 round any.",
            param="quantization",
        )
    return QuantizationPlan(form, None)


def _name(form: CheckpointFormat | None, folder: Path) -> str:
    if form is not None:
        return form.name
    return "gguf" if source_of(folder) is not None else ""


def _read_quantization_config(folder: Path, raw: dict[str, Any], asked: str | None) -> Any:
    """Return the quantization settings from config.json, or from a file next to it."""
    quantization = quantization_config_of(raw)
    if quantization:
        return quantization
    path = folder / MODELOPT_FILE
    if path.is_file():
        return quantization_of(parse_object(read_text(path), path), str(path))
    for method in CHECKPOINT_METHODS.get(asked or "", ()):
        for path in (folder / name for name in _OLD_FILES.get(method, ())):
            if path.is_file():
                return {**parse_object(read_text(path), path), "quant_method": method}
    return None


HOST = torch.device("cpu")


def refuse_rope_settings(spec: ModelSpec, config: EngineConfig) -> None:
    """Raise `ConfigError` for rope settings that would have no effect."""
    for name in ("rope_scaling", "rope_theta"):
        if getattr(config, name) is not None and spec.rope is None:
            raise ConfigError(
                f"{name} is set, but {spec.architecture} has no rotary embedding.", param=name
            )


def reject_online_quantization(rounds: str | None, what: str) -> None:
    """Raise `ConfigError` for a kind of model whose weights can't be rounded while they load."""
    if rounds is not None:
        raise ConfigError(
            f"quantization={rounds!r} is not supported for {what}.", param="quantization"
        )


def refuse_kv_scale_file(config: EngineConfig, what: str) -> None:
    """Raise `ConfigError` for a file of KV scales, which only the native decoder uses."""
    if config.quantization_param_path is not None:
        raise ConfigError(f"{KV_SCALE_PARAM} isn't used for {what}.", param=KV_SCALE_PARAM)


def reject_state_dtype(config: EngineConfig, what: str) -> None:
    """Raise `ConfigError` for a state dtype if the model's states are always float32."""
    if config.mamba_ssm_cache_dtype not in ("auto", "float32"):
        raise ConfigError(
            f"mamba_ssm_cache_dtype={config.mamba_ssm_cache_dtype} is not supported for {what}, "
            "whose states are float32.",
            param="mamba_ssm_cache_dtype",
        )


def reject_batch_invariance(config: EngineConfig, device: torch.device, what: str) -> None:
    """Raise `ConfigError` on a GPU, where torch's order of summation depends on the batch size."""
    if config.batch_invariant and device != HOST:
        raise ConfigError(
            f"batch_invariant is not supported for {what} on a GPU.", param="batch_invariant"
        )


def check_online_quantization(rounds: str | None, ops: KernelSet) -> None:
    """Raise `ConfigError` if the device has no kernels for the quantization method."""
    supported = (*ops.quantizations, *CODE_FORMATS)
    if rounds is not None and rounds not in supported:
        raise ConfigError(
            f"quantization={rounds!r} is not supported by the {ops.name} kernels on "
            f"{ops.device.type}, which support {', '.join(supported)}.",
            param="quantization",
        )


log = logging.getLogger(__name__)

_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class LoadedImpl:
    """A model with its weights.

    Attributes:
        dtype: the dtype of its linear weights.
        max_model_len: the context length that is served.
        pooler: set for a pooling model.
    """

    model: EngineModel
    spec: ModelSpec
    dtype: torch.dtype
    max_model_len: int
    pooler: Pooler | None = None


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments of `build_model`.

    Attributes:
        folder: the checkpoint's folder.
        raw: its config.json with the settings applied.
        config: the settings.
        ops: the device's kernels.
        quantized: how the checkpoint was quantized, and how its weights are rounded.
        progress: called with (done, total) while weights load.
        ranks: the tensor-parallel ranks; None if this process holds whole layers.
        stage: this process's pipeline stage; None if it holds all layers.
        expert_ranks: processes that share only the experts, each with its own tokens; or None.
    """

    folder: Path
    raw: dict[str, Any]
    config: EngineConfig
    ops: kernels.KernelSet
    progress: Callable[[int, int], None]
    quantized: QuantizationPlan = QuantizationPlan(None, None)
    ranks: RankGroup | None = None
    stage: PipelineStage | None = None
    expert_ranks: RankGroup | None = None


def _expert_shard(order: BuildRequest, spec: DecoderSpec) -> ExpertShard | None:
    """The experts of this rank. Raises `ConfigError` for a model without any, whose ranks would
    share nothing.
    """
    config = order.config
    if order.expert_ranks is not None:
        if spec.moe is None:
            raise ConfigError(
                f"{DATA_PARAM}={order.expert_ranks.size} with enable_expert_parallel can't be "
                f"used: {spec.architecture} has no experts. Leave both out, and run more replicas.",
                param=DATA_PARAM,
            )
        return ExpertShard(
            order.expert_ranks, row_ranks=1 if order.ranks is None else order.ranks.size
        )
    if order.ranks is None or not config.enable_expert_parallel:
        return None
    return ExpertShard(order.ranks, config.eplb.num_redundant_experts if config.eplb else 0)


def reject_ranks(order: BuildRequest, what: str) -> None:
    """Raise `ConfigError` if several ranks are requested for a model that runs in one process."""
    groups = {
        PARAM: order.ranks, PIPELINE_PARAM: order.stage, DATA_PARAM: order.expert_ranks
    }  # fmt: skip
    for param, group in groups.items():
        if group is not None:
            raise ConfigError(
                f"{param}={group.size} can't be used for {what}: several ranks share models of "
                "the native decoder alone. Leave it out.",
                param=param,
            )


def build_model(order: BuildRequest) -> LoadedImpl:
    """Make the model. Raises `ModelLoadError` or `ConfigError`."""
    folder, raw, config = order.folder, order.raw, order.config
    order = dataclasses.replace(order, quantized=resolve_quantization(folder, raw, config))
    outside = ModelRegistry.find(raw)
    pooling = read_pooling_config(config, folder, raw) if outside is None else None
    if pooling is not None:
        return _pooled(order, pooling)
    if outside is not None:
        if is_transformers(outside):
            return _bridged(order, outside)
        return _native(order, outside)
    if config.model_impl == "transformers":
        return _bridged(order)
    if config.model_impl == "quire":
        return _native(order, vision=find_vision_family(raw))
    vision = find_vision_family(raw)
    if vision is None and not has_native_decoder(raw):
        return _bridged(order)
    try:
        if vision is None:
            _check_device_support(decoder_spec(raw), order)
        else:
            decoder_spec(vision.text_config)
    except BadModelConfig:
        raise
    except ModelLoadError as refused:
        return _fallback_to_transformers(order, refused)
    return _native(order, vision=vision)


def refuse_unknown(order: BuildRequest) -> None:
    """Raise `ModelLoadError` for an unsupported architecture, without reading weights."""
    folder, raw, config = order.folder, order.raw, order.config
    if ModelRegistry.find(raw) is not None or has_native_decoder(raw) or find_vision_family(raw):
        return
    if read_pooling_config(config, folder, raw) is None:
        from engine.transformers_backend.load import Source

        Source(folder, raw, config.trust_remote_code, dummy=True)


def _fallback_to_transformers(order: BuildRequest, refused: ModelLoadError) -> LoadedImpl:
    """Use `transformers` for a native architecture with a setting that only it supports."""
    try:
        built = _bridged(order)
    except (ModelLoadError, ConfigError) as error:
        raise ModelLoadError(
            f"{refused.message} By the Transformers bridge: {error.message}", param=refused.param
        ) from error
    log.info("%s It runs through the Transformers bridge.", refused.message)
    return built


def _check_device_support(spec: DecoderSpec, order: BuildRequest) -> None:
    """Raise `ModelLoadError` for layers that run only on CPUs if the device is another one."""
    if order.ops.device != HOST and spec.cross is not None:
        raise ModelLoadError(
            f"{spec.architecture} attends to an encoder's states, which a CPU alone does."
        )
    if order.ops.device != HOST and spec.altup is not None:
        raise ModelLoadError(
            f"{spec.architecture} has several hidden states a token: it runs natively on a CPU "
            "alone."
        )
    if order.ops.device != HOST and spec.latents is not None and spec.latents.index is not None:
        raise ModelLoadError(
            f"{spec.architecture} chooses the tokens that it attends to: it runs natively on a CPU "
            "alone."
        )


def _check_dummy_size(spec: DecoderSpec, dtype: torch.dtype, order: BuildRequest) -> None:
    """Raise `BadModelConfig` for random weights that don't fit into the host's memory."""
    if order.config.load_format != "dummy" or order.ops.device != HOST:
        return
    sizes = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        **({} if spec.moe is None else {"num_experts": spec.moe.num_experts}),
    }
    # No method rounds to fewer than 4 bits.
    bits = 8 * dtype.itemsize if order.quantized.rounds is None else 4
    check_dummy_size(spec.architecture, sizes, spec.num_parameters * bits // 8)


def _native(
    order: BuildRequest, outside: Any = None, vision: VisionFamily | None = None
) -> LoadedImpl:
    """Build the native decoder, with its encoder if it has one, or an external class with the same
    interface.
    """
    folder, raw, config = order.folder, order.raw, order.config
    if outside is not None:
        reject_ranks(order, "a model class of your own")
    if vision is not None:
        spec = dataclasses.replace(
            decoder_spec(vision.text_config),
            architecture=raw["architectures"][0],
            bidirectional_span=vision.bidirectional_span,
        )
    else:
        spec = decoder_spec(raw) if outside is None else outside.make_spec(raw)
    if outside is None:
        _check_device_support(spec, order)
    refuse_rope_settings(spec, config)
    max_model_len = context_length(spec, config)
    if spec.states is not None and spec.states.kind == "rg_lru":
        reject_state_dtype(config, f"{spec.architecture}'s recurrent units")
    elif spec.states is not None and spec.states.keys and config.mamba_ssm_cache_dtype != "auto":
        states = dataclasses.replace(spec.states, dtype=config.mamba_ssm_cache_dtype)
        spec = dataclasses.replace(spec, states=states)
    if config.disable_sliding_window:
        spec = dataclasses.replace(spec, sliding_windows=(0,) * spec.num_layers)
    dtype = resolve_dtype(config.dtype, spec.dtype)
    ops = order.ops
    form, rounds = order.quantized.form, order.quantized.rounds
    check_online_quantization(rounds, ops)
    if isinstance(spec, DecoderSpec):
        _check_dummy_size(spec, dtype, order)
    weights = open_weights(folder, config, ops.device, form)
    if outside is None:
        ops = with_attention_backend(ops, spec, dtype, config)
        rounds_attention = config.round_activations and not config.batch_invariant
        spec = dataclasses.replace(
            spec, round_attention=rounds_attention and dtype == torch.bfloat16
        )
        if vision is not None:
            for prefix, part_folder in vision.part_folders:
                if form is not None:
                    raise ModelLoadError(
                        f"{folder} names {part_folder} as a part: such a checkpoint can't be "
                        "quantized. Use quantization=int8 or int4."
                    )
                if isinstance(weights, WeightReader):  # dummy weights have no names to look up
                    weights.add_folder(Path(part_folder), prefix)
        located = locate_text(spec, weights)
        if located is None and vision is not None:
            raise ModelLoadError(f"{spec.architecture}: there is no text model in it.")
        spec = located or spec  # a missing tensor is reported when it is read
        kind = NativeDecoder if vision is None else VisionDecoder
        text_spec = text_encoder_spec(raw)
        if spec.cross is not None:
            kind = WhisperModel if text_spec is None else TextToTextModel
        model: EngineModel = kind(
            spec,
            ops,
            dtype,
            max_model_len,
            rounds,
            config.round_activations,
            order.ranks,
            order.stage,
            expert_shard=_expert_shard(order, spec),
            deals_tokens=config.deals_tokens,
            reopen_weights=lambda: open_weights(folder, config, order.ops.device, form),
        )
        if isinstance(model, VisionDecoder) and vision is not None:
            model.family, model.only_encodes = vision, config.only_encodes
        if isinstance(model, TextToTextModel) and text_spec is not None:
            model.text_spec = text_spec
            model.decoder_start_ids = read_start_ids(raw, read_generation_config(folder))
        if isinstance(model, WhisperModel):
            model.encoder_spec = WhisperEncoderSpec.of_config(raw)
            model.alignment_heads = read_alignment_heads(
                read_generation_config(folder), spec.num_layers, spec.num_heads
            )
    else:
        reject_online_quantization(rounds, spec.architecture)
        model = outside(spec, ops, dtype, max_model_len)
    path = config.quantization_param_path
    if outside is not None:
        refuse_kv_scale_file(config, spec.architecture)
    model_type = str(raw.get("model_type"))
    scales: Sequence[KVScales | None] = ()
    if path:
        scales = read_kv_scale_file(path, model_type, spec.num_layers)
    if isinstance(model, NativeDecoder) and not scales:
        read = weights.numbers if isinstance(weights, WeightReader) else None
        scales = read_kv_scales(read, model.full_spec)  # before the layers allocate memory
    model.load(weights, order.progress)
    if isinstance(model, NativeDecoder):
        model.set_kv_scales(scales)
    # Weights that this stage or expert-parallel rank doesn't read belong to another, and those of a
    # decoder to replicas that don't only encode.
    is_partial = order.stage is not None or _expert_shard(order, spec) is not None
    is_partial |= config.only_encodes
    unread = [] if is_partial else weights.unused_names()
    if vision is not None:
        unread = [name for name in unread if not name.startswith(vision.ignored_prefixes)]
    if outside is None:
        unread = drop_mtp_weights(unread, spec, raw)  # read by the draft model instead
    if unread:
        log.warning("%d tensors of the checkpoint weren't used: %s", len(unread), unread[:5])
    weights.close()
    return LoadedImpl(model, spec, dtype, max_model_len)


def _pooled(order: BuildRequest, settings: PoolingModelConfig) -> LoadedImpl:
    """Build a pooling model, which returns vectors, labels or scores."""
    folder, raw, config = order.folder, order.raw, order.config
    if order.stage is not None or order.expert_ranks is not None:
        reject_ranks(order, "a pooling model")
    if config.deals_tokens:
        raise ConfigError(
            f"{CONTEXT_PARAM} can't be used for a pooling model, which decodes nothing.",
            param=CONTEXT_PARAM,
        )
    check_online_quantization(order.quantized.rounds, order.ops)
    refuse_kv_scale_file(config, "a pooling model")
    reject_batch_invariance(config, order.ops.device, "pooling models")
    vision = find_vision_family(raw)
    spec = pooled_spec(settings, raw, vision)
    if vision is not None or isinstance(spec, DualEncoderSpec):
        reject_ranks(order, "a model that sees")
        if vision is None and order.ops.device != HOST:
            raise ModelLoadError(f"{raw['architectures'][0]} runs on a CPU alone.")
    elif isinstance(spec, DecoderSpec):
        _check_device_support(spec, order)
    else:
        reject_ranks(order, "an encoder")
    max_model_len = context_length(spec, config, settings.max_length)
    dtype = resolve_dtype(config.dtype, spec.dtype)
    if isinstance(spec, DecoderSpec):
        _check_dummy_size(spec, dtype, order)
    shard = _expert_shard(order, spec) if isinstance(spec, DecoderSpec) else None
    model, pooler = load_pooled(
        settings, spec, folder, config, order.ops, dtype, max_model_len, order.progress,
        order.quantized.form, order.quantized.rounds, order.ranks, vision, shard,
    )  # fmt: skip
    # An encoder has no logits, and pooling doesn't need any.
    return LoadedImpl(cast(EngineModel, model), spec, dtype, max_model_len, pooler)


def _bridged(order: BuildRequest, outside: Any = None) -> LoadedImpl:
    """Build a model of `transformers`, which is only imported here."""
    folder, raw, config = order.folder, order.raw, order.config
    reject_ranks(dataclasses.replace(order, ranks=None), "a model of the Transformers bridge")
    if order.ranks is not None:
        _check_bridged_ranks(config)
    reject_batch_invariance(config, order.ops.device, "the Transformers bridge")
    refuse_kv_scale_file(config, "a model of the Transformers bridge")
    reject_state_dtype(config, "a model of the Transformers bridge")
    from engine.transformers_backend.load import Source, load_bridge, without_windows

    if config.load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(
            f"load_format={config.load_format} is for models that Quire runs natively; "
            "this one runs through transformers, from safetensors.",
            param="load_format",
        )
    dummy = config.load_format == "dummy"
    source = Source(folder, raw, config.trust_remote_code, outside, dummy, order.quantized.form)
    spec = source.spec(config.max_model_len)
    if not source.rotates:
        refuse_rope_settings(spec, config)
    dtype = resolve_dtype(config.dtype, spec.dtype)
    max_model_len = context_length(spec, config)
    rounds = order.quantized.rounds
    check_online_quantization(rounds, kernels.get(HOST, use_compiled=config.cpu_kernels))
    # Models are explored and verified on the CPU. Weights that move to another device are packed as
    # plain tensors.
    moves = order.ops.device != HOST
    ops = kernels.get(HOST, use_compiled=config.cpu_kernels and not moves)
    scheme = make_quant_scheme(rounds)
    model = load_bridge(
        source, spec, ops, dtype, max_model_len, order.progress, scheme, order.ranks
    )
    if moves:
        model.to_device(order.ops)
    if config.disable_sliding_window:
        max_model_len = min([max_model_len, *filter(None, model.spec.sliding_windows)])
        without_windows(model)
    return LoadedImpl(model, model.spec, dtype, max_model_len)


def _check_bridged_ranks(config: EngineConfig) -> None:
    """Raise `ConfigError` for ways of sharing that plans of `transformers` don't describe here."""
    settings = {
        CONTEXT_PARAM: config.deals_tokens,
        "enable_expert_parallel": config.enable_expert_parallel,
    }
    for param, is_set in settings.items():
        if is_set:
            raise ConfigError(
                f"{param} can't be used for a model of the Transformers bridge: ranks share its "
                "heads and linear layers alone. Leave it out.",
                param=param,
            )


def resolve_dtype(requested: str, checkpoint: str) -> torch.dtype:
    """Return the dtype of the weights in memory; with "auto" it is the checkpoint's."""
    name = checkpoint.removeprefix("torch.") if requested == "auto" else requested
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ModelLoadError(f"config.json: dtype {checkpoint!r} isn't supported.", param="dtype")
    return dtype


def derived_max_len(spec: ModelSpec) -> int:
    """Return the longest context that the checkpoint supports, rope scaling included."""
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


def context_length(spec: ModelSpec, config: EngineConfig, default: int | None = None) -> int:
    """Return the context length to serve: the operator's setting, else `default`, else the model's.

    Raises `ConfigError` if the setting exceeds the model's.
    """
    derived = derived_max_len(spec)
    windows = [window for window in spec.sliding_windows if window]
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
