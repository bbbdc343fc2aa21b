"""OpenVINO on x86-64 CPUs: the native decoders as OpenVINO graphs (docs/devices.md)."""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
from typing import Any, ClassVar

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from quire_openvino_graph import build_graph, unsupported_feature
from torch import Tensor

from engine.contract.checkpoint_options import ONLINE_METHODS
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.devices import CacheRequirements, Device, RunnerInputs
from engine.devices.cpu import kernels_on
from engine.devices.host_memory import num_cpu_blocks
from engine.devices.native_decoder import build_native_decoder, require_native_decoder
from engine.kv_cache.kv_cache_config import KVCacheConfig, single_group_config
from engine.model_loader.loader import LoadedModel
from engine.model_loader.model_impl import BuildRequest, LoadedImpl, resolve_dtype
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import AttentionMetadata
from engine.sampling.sampler import Sampler
from engine.worker.interface import Runner
from engine.worker.model_runner import ModelRunner
from kernels import KernelSet
from kernels.reference import ReferenceKernels

#: By the dtype of weights, what OpenVINO computes in, and the KV caches that it has there.
_ARITHMETIC = {
    torch.float32: ("f32", (torch.float32, torch.float16, torch.int8)),
    torch.float16: ("f32", (torch.float16, torch.float32, torch.int8)),
    torch.bfloat16: ("bf16", (torch.bfloat16, torch.int8)),
}
_CACHE_PRECISIONS = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "u8",
}
_PLANES = ("key", "value")
#: numpy's types by their size in bytes: it has no bfloat16.
_STORAGE = {1: np.uint8, 2: np.uint16, 4: np.float32}
_SPACE, _PRECISION, _QUANTIZED = (
    "VLLM_OPENVINO_KVCACHE_SPACE",
    "VLLM_OPENVINO_CPU_KV_CACHE_PRECISION",
    "VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS",
)
_PRECISION_SETTINGS = {"u8": "int8", "f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def apply_variables(config: EngineConfig) -> None:
    """Change settings that are at their defaults to what vLLM's variables for OpenVINO say.

    Raises `ConfigError` that names the variable.
    """
    space = os.environ.get(_SPACE, "")
    if space and config.cpu_kvcache_space is None:
        try:
            gibibytes = float(space)
        except ValueError:
            gibibytes = -1.0
        if not 0 <= gibibytes < float("inf"):
            raise ConfigError(f"{_SPACE} must be a number of GiB; got {space!r}.", param=_SPACE)
        config.cpu_kvcache_space = gibibytes or None  # 0 is vLLM's default
    precision = os.environ.get(_PRECISION, "").lower()
    if precision and config.kv_cache_dtype == "auto":
        if precision not in _PRECISION_SETTINGS:
            raise ConfigError(
                f"{_PRECISION} must be one of {', '.join(_PRECISION_SETTINGS)}; got {precision!r}.",
                param=_PRECISION,
            )
        config.kv_cache_dtype = _PRECISION_SETTINGS[precision]
    switch = os.environ.get(_QUANTIZED, "").lower()
    if switch not in ("", "on", "off", "1", "0", "true", "false"):
        raise ConfigError(f"{_QUANTIZED} must be ON or OFF; got {switch!r}.", param=_QUANTIZED)
    if switch in ("on", "1", "true") and config.quantization is None:
        config.quantization = "int8"


class OpenVinoModel:
    """A native decoder that OpenVINO computes: tokens in, logits out.

    Args:
        decoder: with weights of the reference kernels, whose memory the graph shares.
        dtype: of its weights.
        int8_weights: round linear weights to 8 bits while the graph is compiled.
        num_threads: for a step.
    """

    stateful = False

    def __init__(
        self, decoder: NativeDecoder, dtype: torch.dtype, int8_weights: bool, num_threads: int
    ) -> None:
        self.spec: DecoderSpec = decoder.spec
        self.decode_bytes = decoder.decode_bytes // (dtype.itemsize if int8_weights else 1)
        self.load_report = decoder.load_report
        self._decoder, self._dtype = decoder, dtype
        self._int8, self._num_threads = int8_weights, num_threads
        #: KV cache groups, and the names of the graph's inputs.
        self._groups: list[int] = []
        self._inputs: set[str] = set()
        self._block_size = 0
        #: The groups by layer and the cache's dtype that the graph was compiled for, and the graph.
        self._compiled: tuple[Any, Any] = (None, None)
        self._request: Any = None
        self._cache_memory: list[NDArray[Any]] = []

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        layout = layout or single_group_config(self.spec.num_layers)
        groups = tuple(layout.group_by_layer())
        self._block_size, self._groups = block_size, sorted(set(groups))
        compiled = self._compile(groups, dtype)
        self._inputs = {port.any_name for port in compiled.inputs}
        try:
            caches = [
                [_zeros(compiled.input(f"{plane}_cache.0"), num_blocks) for plane in _PLANES]
                for _ in range(layout.layers_per_block)
            ]
        except MemoryError as error:
            raise ConfigError(
                f"No room for a KV cache of {num_blocks} blocks of {block_size} tokens: {error}.",
                param="num_gpu_blocks_override",
            ) from error
        self._cache_memory = [array for pair in caches for _, array in pair]
        self._request = compiled.create_infer_request()
        for layer, slot in enumerate(layout.slot_by_layer()):
            for plane, (cache, _) in zip(_PLANES, caches[slot], strict=True):
                self._request.set_tensor(f"{plane}_cache.{layer}", cache)

    def _compile(self, groups: tuple[int, ...], cache_dtype: torch.dtype) -> Any:
        if self._compiled[0] == (groups, cache_dtype):
            return self._compiled[1]
        graph = build_graph(self._decoder, groups, self._int8)
        options = {
            "INFERENCE_PRECISION_HINT": _ARITHMETIC[self._dtype][0],
            "KV_CACHE_PRECISION": _CACHE_PRECISIONS[cache_dtype],
            # By channel, OpenVINO rounds a key again with each later token of its block, and
            # writes beyond its buffer where a chunk begins within a block and ends behind it.
            "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
            "INFERENCE_NUM_THREADS": self._num_threads,
            "ENABLE_CPU_PINNING": False,
        }
        try:
            compiled = ov.Core().compile_model(graph, "CPU", options)
        except RuntimeError as error:
            raise ModelLoadError(
                f"OpenVINO can't compile {self.spec.architecture}: {str(error).strip()[-300:]}"
            ) from error
        self._compiled = ((groups, cache_dtype), compiled)
        return compiled

    def release_kv(self) -> None:
        """Release the KV cache until `allocate_kv`."""
        self._request, self._cache_memory = None, []

    def forward(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Logits, float32 [num_rows, vocab_size]."""
        starts, ends = context.query_start_loc.numpy(), context.seq_lens.numpy()
        num_blocks = -(-ends // self._block_size)
        begins = np.zeros(len(ends) + 1, dtype=np.int32)
        np.cumsum(num_blocks, out=begins[1:])
        rows = context.logits_rows
        inputs = {
            "input_ids": token_ids.numpy(),
            "position_ids": context.positions.numpy(),
            "logits_rows": np.arange(len(token_ids)) if rows is None else rows.numpy(),
            "past_lens": ends - np.diff(starts),
            "subsequence_begins": starts,
            "block_indices_begins": begins,
            "max_context_len": np.array(ends.max()),
        }
        for group in self._groups:
            tables = context.groups[group].block_tables.numpy()
            is_used = np.arange(tables.shape[1]) < num_blocks[:, None]
            inputs[f"block_indices.{group}"] = tables[is_used]
        for name in self._inputs & inputs.keys():
            self._request.set_tensor(name, ov.Tensor(inputs[name]))
        self._request.infer()
        return torch.from_numpy(self._request.get_output_tensor(0).data.copy())

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def _zeros(port: Any, num_blocks: int) -> tuple[Any, NDArray[Any]]:
    """A cache of the shape and type that OpenVINO chose, and its memory, which the tensor doesn't
    keep alive. Pages are mapped when first written.
    """
    shape = [num_blocks, *(dimension.get_length() for dimension in list(port.partial_shape)[1:])]
    kind = port.element_type
    array = np.zeros(shape, dtype=_STORAGE[kind.size])
    return ov.Tensor(array, ov.Shape(shape), kind), array


class OpenVinoDevice(Device):
    """This machine's CPUs, by OpenVINO."""

    name: ClassVar[str] = "openvino"
    block_size: ClassVar[int] = 32
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16", "int8")

    def __init__(self, config: EngineConfig) -> None:
        apply_variables(config)
        super().__init__(config)
        #: The CPU's kernels: they choose tokens sooner than torch does.
        self._sampling_kernels = kernels_on("cpu", config)

    @classmethod
    def unavailable_reason(cls) -> str:
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"its kernels are for x86-64; this machine is {platform.machine()}."
        return ""

    def make_kernels(self) -> KernelSet:
        return ReferenceKernels(why="OpenVINO computes the model")

    @property
    def arithmetic(self) -> tuple[str, str]:
        return self.name, f"OpenVINO {ov.__version__}, torch {torch.__version__}"

    def build_model(self, request: BuildRequest) -> LoadedImpl:
        spec = require_native_decoder(request, self.name, unsupported_feature)
        config = copy.copy(request.config)
        int8_weights = config.quantization == "int8"
        if int8_weights:  # rounded in the graph
            config.quantization = None
        if config.quantization in ONLINE_METHODS:
            raise ConfigError(
                f"quantization must be int8 on the device openvino; got {config.quantization}.",
                param="quantization",
            )
        dtype = resolve_dtype(config.dtype, spec.dtype)
        cache_dtypes = _ARITHMETIC[dtype][1]
        if config.kv_cache_dtype not in ("auto", *map(_name, cache_dtypes)):
            raise ConfigError(
                f"kv_cache_dtype must be {' or '.join(map(_name, cache_dtypes))} for a model in "
                f"{_name(dtype)} on the device openvino; got {config.kv_cache_dtype}.",
                param="kv_cache_dtype",
            )
        changed = dataclasses.replace(request, config=config)
        built, decoder = build_native_decoder(changed, self.name)
        model = OpenVinoModel(decoder, built.dtype, int8_weights, self._threads.count)
        return dataclasses.replace(built, model=model)

    def num_blocks(self, need: CacheRequirements) -> int:
        token_bytes = need.bytes_per_token
        if need.dtype == torch.int8:
            # A scale and a zero point of float32 for each key and value, not a scale alone.
            head_dim = need.loaded.spec.head_dim
            token_bytes = token_bytes // (head_dim + 4) * (head_dim + 8)
        return num_cpu_blocks(
            self.config, token_bytes, need.blocks_per_sequence, len(need.layout.groups)
        )

    def use_threads(self, loaded: LoadedModel) -> None:
        self._threads.use(self._sampling_kernels, torch_too=True)

    def make_runner(self, parts: RunnerInputs) -> Runner:
        sampler = Sampler(parts.loaded.eos_token_ids, self._sampling_kernels)
        return ModelRunner(parts.loaded.model, parts.batch, sampler, masks=parts.masks)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
