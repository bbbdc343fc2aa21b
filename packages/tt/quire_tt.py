"""Tenstorrent devices: models of tt-metal behind their vLLM interface (docs/tenstorrent.md)."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig

from engine.contract.errors import ConfigError, InvalidRequest, ModelLoadError
from engine.devices import CacheRequirements, Device, RunnerInputs
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.model_loader.model_impl import (
    BuildRequest,
    LoadedImpl,
    context_length,
    resolve_dtype,
)
from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import AttentionMetadata
from engine.models.registry import ModelRegistry, decoder_spec
from engine.sampling.sampler import Sampler
from engine.worker.input_batch import InputBatch
from engine.worker.interface import Runner
from engine.worker.model_runner import ModelRunner
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
    "T3K": (1, 8),
    "TG": (8, 4),
}
METHODS = ("initialize_vllm_model", "allocate_kv_cache", "prefill_forward", "decode_forward")
#: Tokens of all sequences that the KV cache holds by default.
DEFAULT_CACHE_TOKENS = 131_072


def mesh_shape(name: str | None, num_chips: int) -> tuple[int, int]:
    """Rows and columns of the mesh that MESH_DEVICE names; None: one row of all chips.

    Raises `ConfigError` for an unknown name, and for a mesh of more chips than there are.
    """
    shape = (1, num_chips) if name is None else MESH_SHAPES.get(name)
    if shape is None:
        raise ConfigError(
            f"MESH_DEVICE must be one of {', '.join(MESH_SHAPES)}; got {name!r}.",
            param="MESH_DEVICE",
        )
    if shape[0] * shape[1] > num_chips:
        raise ConfigError(
            f"MESH_DEVICE={name} has {shape[0] * shape[1]} chips; this machine has {num_chips}.",
            param="MESH_DEVICE",
        )
    return shape


class TTModel:
    """A model of tt-metal as the engine's runner sees it: tokens in, logits out.

    Block 0 of the device's cache belongs to no sequence. Rows that only pad a batch are all zeros,
    so they write to it and read from it; a sequence's block b is the device's block b + 1.
    """

    stateful = False
    decode_bytes = 0

    def __init__(self, model: Any, spec: DecoderSpec, max_batch_size: int) -> None:
        self._model = model
        self.spec = spec
        self._max_batch_size = max_batch_size
        #: The running batch; set before the first step.
        self.batch: InputBatch | None = None
        self._cache: Any = None
        self._max_num_blocks = 0

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        spec = self.spec
        shape = (num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
        self._max_num_blocks = num_blocks + 1
        self._cache = self._model.allocate_kv_cache(shape, dtype, spec.num_layers)
        if hasattr(self._model, "warmup_model_prefill"):
            self._model.warmup_model_prefill(
                kv_cache=self._cache, enable_trace=True, sampling_params=[None]
            )

    def forward(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Logits [num_rows, vocab_size] of `context.logits_rows`, each a sequence's last token."""
        starts = context.query_start_loc.long()
        counts = starts.diff()
        num_cached = context.seq_lens.long() - counts
        tables = context.block_tables.int() + 1
        if bool((counts == 1).all()) and bool((num_cached > 0).all()):
            logits = self._decode(token_ids, num_cached, tables)
        else:
            logits = self._prefill(context, num_cached, tables)
        logits = logits.reshape(len(counts), -1)[:, : self.spec.vocab_size].float()
        last = starts[1:] - 1
        rows = torch.arange(len(token_ids)) if context.logits_rows is None else context.logits_rows
        sequences = torch.searchsorted(last, rows).clamp(max=len(last) - 1)
        if not torch.equal(last[sequences], rows):
            raise InvalidRequest(
                "A Tenstorrent model has logits of a sequence's last token only: prompt_logprobs "
                "aren't available.",
                param="prompt_logprobs",
            )
        return logits[sequences]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def _prefill(self, context: AttentionMetadata, num_cached: Tensor, tables: Tensor) -> Tensor:
        if self.batch is None or context.sequence_rows is None:
            raise RuntimeError("A prompt has come before the running batch was set.")
        lengths = context.seq_lens.int()
        longest, block_size = int(lengths.max()), self.batch.block_size
        tokens = torch.zeros(len(lengths), longest, dtype=torch.int32)
        # Tables are zero after a sequence's last block.
        pages = torch.zeros(len(lengths), -(-longest // block_size), dtype=torch.int32)
        for index, (row, length) in enumerate(
            zip(context.sequence_rows.tolist(), lengths.tolist(), strict=True)
        ):
            tokens[index, :length] = torch.from_numpy(self.batch.tokens[row, :length])
            num_pages = -(-length // block_size)
            pages[index, :num_pages] = tables[index, :num_pages]
        cached = {"start_pos": num_cached.tolist()} if bool(num_cached.any()) else {}
        result: Tensor = self._model.prefill_forward(
            tokens=tokens,
            page_table=pages,
            kv_cache=self._cache,
            prompt_lens=lengths,
            sampling_params=None,
            empty_slots=list(range(len(lengths))),
            **cached,
        )
        return result

    def _decode(self, token_ids: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """All shapes are constant: a trace is recorded for one shape."""
        if self.batch is None:
            raise RuntimeError("A decode has come before the running batch was set.")
        count, size = len(token_ids), self._max_batch_size
        tokens = torch.zeros(size, 1, dtype=torch.int32)
        tokens[:count, 0] = token_ids
        start_pos = torch.zeros(size, dtype=torch.int32)
        start_pos[:count] = positions
        pages = torch.zeros(size, self._max_num_blocks, dtype=torch.int32)
        for row, position in enumerate(positions.tolist()):
            num_pages = position // self.batch.block_size + 1
            pages[row, :num_pages] = tables[row, :num_pages]
        result: Tensor = self._model.decode_forward(
            tokens=tokens,
            start_pos=start_pos,
            page_table=pages,
            kv_cache=self._cache,
            enable_trace=True,
            read_from_device=True,
            sampling_params=None,
        )
        return result[:count]


class TTDevice(Device):
    """The mesh of Tenstorrent chips that MESH_DEVICE names; None: all chips."""

    name: ClassVar[str] = "tt"
    mixes: ClassVar[bool] = False
    runs_whole_prompts: ClassVar[bool] = True
    caches_prefixes: bool = False
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    _mesh: Any = None

    @classmethod
    def unavailable_reason(cls) -> str:
        if importlib.util.find_spec("ttnn") is None:
            return "ttnn isn't installed; it comes with tt-metal."
        import ttnn

        return "" if ttnn.get_device_ids() else "ttnn sees no Tenstorrent chip."

    def make_kernels(self) -> KernelSet:
        return ReferenceKernels(why="sampling on the host")

    def build_model(self, request: BuildRequest) -> LoadedImpl:
        import ttnn

        config, raw = request.config, request.raw
        for field in ("quantization", "speculative_config"):
            if getattr(config, field):
                raise ConfigError(f"{field} can't be used on the device tt.", param=field)
        names = [f"TT{name}" for name in raw.get("architectures") or []]
        kind = ModelRegistry.find({"architectures": names}, METHODS)
        if kind is None:
            raise ModelLoadError(
                f"No Tenstorrent model is registered for {', '.join(names) or '(none)'}. A plug-in "
                "registers one by ModelRegistry.register_model.",
                param="model",
            )
        spec = decoder_spec(raw)
        grid = mesh_shape(os.environ.get("MESH_DEVICE"), len(ttnn.get_device_ids()))
        if self._mesh is None:
            self._mesh = ttnn.open_mesh_device(ttnn.MeshShape(*grid))
        model = kind.initialize_vllm_model(  # type: ignore[attr-defined]
            AutoConfig.from_pretrained(request.folder),
            self._mesh,
            max_batch_size=config.max_num_seqs,
            tt_data_parallel=1,
            optimizations=None,
        )
        capabilities = getattr(kind, "model_capabilities", {})
        self.caches_prefixes = bool(capabilities.get("supports_prefix_caching", False))
        return LoadedImpl(
            TTModel(model, spec, config.max_num_seqs),  # type: ignore[arg-type]
            spec,
            resolve_dtype(config.dtype, spec.dtype),
            context_length(spec, config),
        )

    def num_blocks(self, need: CacheRequirements) -> int:
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        full = self.config.max_num_seqs * need.blocks_per_sequence
        by_default = DEFAULT_CACHE_TOKENS // self.config.block_size
        return max(need.blocks_per_sequence, min(full, by_default))

    def make_runner(self, parts: RunnerInputs) -> Runner:
        model: Any = parts.loaded.model
        model.batch = parts.batch
        sampler = Sampler(parts.loaded.eos_token_ids, None)
        return ModelRunner(model, parts.batch, sampler, masks=parts.masks)

    def close(self) -> None:
        if self._mesh is not None:
            import ttnn

            ttnn.close_mesh_device(self._mesh)
            self._mesh = None
