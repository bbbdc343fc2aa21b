"""Tenstorrent devices: models of tt-metal behind their vLLM interface (docs/tenstorrent.md)."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from quire_tt_runner import TTCrossModel, TTModel, TTRunner, TTSettings, TTVisionModel, call
from transformers import AutoConfig

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.devices import CacheRequirements, Device, RunnerInputs
from engine.devices.cpu import kernels_on
from engine.model_loader.model_impl import (
    BuildRequest,
    LoadedImpl,
    context_length,
    reject_ranks,
    resolve_dtype,
)
from engine.models.registry import ModelRegistry, decoder_spec
from engine.models.vision.registry import find_vision_family
from engine.sampling.sampler import Sampler
from engine.worker.interface import Runner
from kernels import KernelSet
from kernels.reference import ReferenceKernels

#: Rows and columns of chips, by the values of MESH_DEVICE that tt-metal uses.
MESH_SHAPES = {
    "N150": (1, 1),
    "P100": (1, 1),
    "P150": (1, 1),
    "N300": (1, 2),
    "P300": (1, 2),
    "P150x2": (1, 2),
    "N150x4": (1, 4),
    "P150x4": (1, 4),
    "P300x2": (1, 4),
    "T3K": (1, 8),
    "P150x8": (1, 8),
    "TG": (8, 4),
}
METHODS = ("initialize_vllm_model", "allocate_kv_cache", "prefill_forward", "decode_forward")
#: Tokens of all sequences that the KV cache holds by default.
DEFAULT_CACHE_TOKENS = 131_072
#: Bytes for traces by default, as Tenstorrent's plug-in for vLLM has it.
DEFAULT_TRACE_REGION = 50_000_000

Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`--additional-config '{"tt": {...}}'`, by the names of Tenstorrent's plug-in for vLLM.

    Attributes:
        data_parallel: number of groups of chips that each have the whole model.
        trace_region_size, worker_l1_size, l1_small_size: bytes; None: ttnn's default.
    """

    sample_on_device_mode: Literal["all", "decode_only"] | None = None
    always_compat_sampling: bool = False
    trace_mode: Literal["all", "decode_only", "none"] = "all"
    enable_model_warmup: bool = True
    optimizations: Literal["accuracy", "performance"] | None = None
    data_parallel: Annotated[int, msgspec.Meta(ge=1)] = 1
    trace_region_size: Bytes | None = None
    worker_l1_size: Bytes | None = None
    l1_small_size: Bytes | None = None
    fabric_config: str | None = None
    fabric_reliability_mode: str | None = None
    dispatch_core_axis: Literal["row", "col"] | None = None


def read_options(config: EngineConfig) -> Options:
    """The options of `additional_config`. Raises `ConfigError` that names the option."""
    try:
        options = msgspec.convert((config.additional_config or {}).get("tt", {}), Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"additional_config: {str(error).replace('$.', 'tt.')}.", param="additional_config"
        ) from error
    if config.max_num_seqs % options.data_parallel:
        raise ConfigError(
            f"max_num_seqs must be a multiple of tt.data_parallel ({options.data_parallel}); got "
            f"{config.max_num_seqs}.",
            param="max_num_seqs",
        )
    return options


def mesh_shape(name: str | None, num_chips: int) -> tuple[int, int]:
    """Rows and columns of the mesh that MESH_DEVICE names; None: one row of all chips.

    Raises `ConfigError` for an unknown name, and for a mesh of more chips than there are.
    """
    shape = (1, num_chips) if name is None else MESH_SHAPES.get(name) or _parse_shape(name)
    if shape is None:
        raise ConfigError(
            f"MESH_DEVICE must be one of {', '.join(MESH_SHAPES)} or rows and columns such as "
            f"(4,8); got {name!r}.",
            param="MESH_DEVICE",
        )
    if shape[0] * shape[1] > num_chips:
        raise ConfigError(
            f"MESH_DEVICE={name} has {shape[0] * shape[1]} chips; this machine has {num_chips}.",
            param="MESH_DEVICE",
        )
    return shape


def _parse_shape(text: str) -> tuple[int, int] | None:
    try:
        rows, columns = msgspec.convert(ast.literal_eval(text), tuple[int, int])
    except (ValueError, SyntaxError):  # msgspec's ValidationError is a ValueError
        return None
    return (rows, columns) if min(rows, columns) > 0 else None


class TTDevice(Device):
    """The mesh of Tenstorrent chips that MESH_DEVICE names; None: all chips."""

    name: ClassVar[str] = "tt"
    overlaps: ClassVar[bool] = True
    mixes: ClassVar[bool] = False
    runs_whole_prompts: ClassVar[bool] = True
    caches_prefixes: bool = False
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")
    additional_settings: ClassVar[tuple[str, ...]] = Options.__struct_fields__

    _mesh: Any = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._options = read_options(config)
        self._has_fabric = False

    @classmethod
    def unavailable_reason(cls) -> str:
        if importlib.util.find_spec("ttnn") is None:
            return "ttnn isn't installed; it comes with tt-metal."
        import ttnn

        return "" if ttnn.get_device_ids() else "ttnn sees no Tenstorrent chip."

    def make_kernels(self) -> KernelSet:
        return ReferenceKernels(why="sampling on the host")

    def build_model(self, request: BuildRequest) -> LoadedImpl:
        reject_ranks(request, "the device tt")
        config, raw, options = request.config, request.raw, self._options
        for field in ("quantization", "speculative_config"):
            if getattr(config, field):
                raise ConfigError(f"{field} can't be used on the device tt.", param=field)
        names = [f"TT{name}" for name in raw.get("architectures") or []]
        kind: Any = ModelRegistry.find({"architectures": names}, METHODS)
        if kind is None:
            raise ModelLoadError(
                f"No Tenstorrent model is registered for {', '.join(names) or '(none)'}. A plug-in "
                "registers one by ModelRegistry.register_model."
            )
        capabilities = getattr(kind, "model_capabilities", {})
        mode = None if options.always_compat_sampling else options.sample_on_device_mode
        if mode and not capabilities.get("supports_sample_on_device", True):
            raise ConfigError(
                f"tt.sample_on_device_mode can't be used: {kind.__name__} doesn't sample.",
                param="additional_config",
            )
        vision = find_vision_family(raw)
        wrapper = TTModel if vision is None else TTVisionModel
        text = raw if vision is None else vision.text_config
        if hasattr(kind, "max_cross_attn_tokens"):
            wrapper = TTCrossModel
            # Of its layers, which are Llama's or attend to the picture, the sizes matter alone.
            text = {**raw["text_config"], "architectures": ["LlamaForCausalLM"]}
        spec = decoder_spec(text)
        # The model has one page table for all layers: blocks behind a window stay.
        spec = dataclasses.replace(
            spec, architecture=raw["architectures"][0], sliding_windows=(0,) * spec.num_layers
        )
        max_model_len = context_length(spec, config)
        model = call(
            kind.initialize_vllm_model,
            hf_config=AutoConfig.from_pretrained(request.folder),
            mesh_device=self._open_mesh(),
            max_batch_size=config.max_num_seqs,
            max_seq_len=max_model_len,
            tt_data_parallel=options.data_parallel,
            optimizations=options.optimizations,
        )
        # A block that one group's chips have filled isn't in another's, and a slot's picture isn't
        # in a block of tokens.
        self.caches_prefixes = (
            options.data_parallel == 1
            and wrapper is not TTCrossModel
            and bool(capabilities.get("supports_prefix_caching", False))
        )
        settings = TTSettings(
            max_batch_size=config.max_num_seqs,
            num_groups=options.data_parallel,
            traces_prefill=options.trace_mode == "all",
            traces_decode=options.trace_mode != "none",
            samples_prefill=mode == "all",
            samples_decode=mode is not None,
            warms_up=options.enable_model_warmup,
        )
        return LoadedImpl(
            wrapper(model, spec, settings),  # type: ignore[arg-type]
            spec,
            resolve_dtype(config.dtype, spec.dtype),
            max_model_len,
        )

    def _open_mesh(self) -> Any:
        """The mesh, which is opened once; its links are set up before."""
        import ttnn

        if self._mesh is not None:
            return self._mesh
        options = self._options
        shape = mesh_shape(os.environ.get("MESH_DEVICE"), len(ttnn.get_device_ids()))
        if shape != (1, 1):
            fabric = [_member(ttnn.FabricConfig, "fabric_config", options.fabric_config)]
            if options.fabric_reliability_mode is not None:
                mode = options.fabric_reliability_mode
                fabric.append(_member(ttnn.FabricReliabilityMode, "fabric_reliability_mode", mode))
            ttnn.set_fabric_config(*fabric)
            self._has_fabric = True
        sizes = {name: getattr(options, name) for name in ("worker_l1_size", "l1_small_size")}
        if options.trace_mode != "none":
            sizes["trace_region_size"] = (
                DEFAULT_TRACE_REGION
                if options.trace_region_size is None
                else options.trace_region_size
            )
        arguments = {name: size for name, size in sizes.items() if size is not None}
        if options.dispatch_core_axis is not None:
            axis = getattr(ttnn.DispatchCoreAxis, options.dispatch_core_axis.upper())
            arguments["dispatch_core_config"] = ttnn.DispatchCoreConfig(axis=axis)
        self._mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape), **arguments)
        return self._mesh

    def num_blocks(self, need: CacheRequirements) -> int:
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        full = self.config.max_num_seqs * need.blocks_per_sequence
        by_default = DEFAULT_CACHE_TOKENS // self.config.block_size
        return max(need.blocks_per_sequence, min(full, by_default))

    def make_runner(self, parts: RunnerInputs) -> Runner:
        sampler = Sampler(parts.loaded.eos_token_ids, kernels_on("cpu", self.config))
        model: Any = parts.loaded.model
        return TTRunner(model, parts.batch, sampler, parts.masks)

    def close(self) -> None:
        if self._mesh is not None:
            import ttnn

            ttnn.close_mesh_device(self._mesh)
            self._mesh = None
            if self._has_fabric:
                ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


def _member(kind: Any, option: str, name: str | None) -> Any:
    """A member of one of ttnn's enumerations. Raises `ConfigError` where it has none so named."""
    name = name or "FABRIC_1D"
    member = getattr(kind, name, None)
    if member is None:
        raise ConfigError(
            f"tt.{option} must be a name of ttnn.{kind.__name__}; got {name!r}.",
            param="additional_config",
        )
    return member
