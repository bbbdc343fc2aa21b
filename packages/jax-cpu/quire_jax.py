"""JAX on CPUs, as a stand-in for a TPU: native decoders in static shapes (docs/devices.md)."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from quire_jax_step import (
    StepShape,
    blocks_per_tile,
    compute_logits,
    run_layers,
    unsupported_feature,
    weights_of,
)
from torch import Tensor

from engine.contract.checkpoint_options import ONLINE_METHODS
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import CacheRequirements, Device, RunnerInputs
from engine.devices.cpu import kernels_on
from engine.devices.host_memory import num_cpu_blocks
from engine.devices.native_decoder import build_native_decoder, require_native_decoder
from engine.kv_cache.kv_cache_config import KVCacheConfig, single_group_config
from engine.model_loader.model_impl import BuildRequest, LoadedImpl
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.sampling.sampler import Sampler
from engine.worker.interface import Runner
from engine.worker.model_runner import ModelRunner
from kernels import KernelSet
from kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)

#: vLLM's name of the folder in which compiled programs are kept from one start to the next.
_CACHE_PATH = "VLLM_XLA_CACHE_PATH"
#: Tokens of the smallest program for a prompt.
_MIN_CHUNK = 16


def buckets(first: int, last: int) -> list[int]:
    """Sizes of programs: powers of two times `first`, up to the first one that isn't below `last`.

    Padding costs less than half of a program.
    """
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return sizes


class JaxModel:
    """A native decoder that JAX computes: tokens in, hidden states and logits out.

    A step's sequences of one token share a program, whose size is a bucket of sequences; other
    sequences have one each, of a bucket of tokens. All programs are compiled by `allocate_kv`.

    Args:
        decoder: with weights of the reference kernels.
        max_num_seqs: that decode in one step.
        max_tokens: of a step.
    """

    stateful = False

    def __init__(self, decoder: NativeDecoder, max_num_seqs: int, max_tokens: int) -> None:
        self.spec, self.decode_bytes = decoder.spec, decoder.decode_bytes
        self.load_report = decoder.load_report
        self._shape, self._weights = StepShape.from_spec(decoder.spec), weights_of(decoder)
        self._max_model_len = decoder.max_model_len
        self._decodes = buckets(1, max_num_seqs)
        self._chunks = buckets(_MIN_CHUNK, min(max_tokens, decoder.max_model_len))
        #: See `run_layers`.
        self._layout: Any = None
        self._caches: Any = None
        #: Of a row of block tables, and the first slot beyond the cache.
        self._table_width = self._no_slot = 0

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        layout = layout or single_group_config(self.spec.num_layers)
        self._layout = tuple(
            jnp.array(by_layer, jnp.int32)
            for by_layer in (layout.slot_by_layer(), layout.group_by_layer())
        )
        num_tile_blocks = blocks_per_tile(block_size)
        num_tiles = -(-self._max_model_len // (num_tile_blocks * block_size))
        self._table_width = num_tiles * num_tile_blocks
        self._no_slot = num_blocks * block_size
        shape = layout.layers_per_block, num_blocks, block_size, self._shape.num_kv_heads
        name = str(dtype).removeprefix("torch.")
        try:
            # Arrays with a device, as programs return them: without one the first call is another
            # program than the second.
            self._caches = tuple(
                jax.device_put(jnp.zeros((*shape, self._shape.head_dim), name), jax.devices()[0])
                for _ in "kv"
            )
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            raise ConfigError(
                f"No room for a KV cache of {num_blocks} blocks of {block_size} tokens: {error}.",
                param="num_gpu_blocks_override",
            ) from error
        self._warm_up(len(layout.groups))

    def release_kv(self) -> None:
        """Release the KV cache until `allocate_kv`."""
        self._caches = None

    @property
    def has_lost_cache(self) -> bool:
        """Whether a program that failed has taken the KV cache with it: it is donated to each."""
        return self._caches is not None and any(cache.is_deleted() for cache in self._caches)

    def _warm_up(self, num_groups: int) -> None:
        """Compile every program."""
        started = time.perf_counter()
        sizes = [(count, 1) for count in self._decodes] + [(1, count) for count in self._chunks]
        for size in sizes:
            tokens = np.zeros(size, dtype=np.int32)
            unused = np.full((num_groups, *size), self._no_slot, dtype=np.int32)
            tables = np.zeros((num_groups, size[0], self._table_width), dtype=np.int32)
            self._run(tokens, tokens, unused, tables)
        for count in self._decodes:
            self.logits(torch.zeros(count, self.spec.hidden_size))
        log.info(
            "JAX: %d programs are ready after %.1f s.",
            len(sizes) + len(self._decodes),
            time.perf_counter() - started,
        )

    def _run(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """See `run_layers`. The host's arrays must have a program's shapes."""
        hidden, self._caches = run_layers(
            self._shape, self._weights, self._layout, self._caches, token_ids, positions, slots,
            tables,
        )  # fmt: skip
        return np.asarray(hidden)

    def forward(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Hidden states after the final norm, float32 [num_rows, hidden]."""
        starts = context.query_start_loc.numpy()
        counts = np.diff(starts)
        hidden = np.empty((len(token_ids), self.spec.hidden_size), dtype=np.float32)
        # In order: a sequence may begin behind blocks that an earlier one fills in this step.
        row = 0
        while row < len(counts):
            is_longer = counts[row : row + self._decodes[-1]] != 1
            end = row + (int(is_longer.argmax()) if is_longer.any() else len(is_longer))
            if end > row:
                rows = np.arange(row, end)
                self._fill(hidden, token_ids, context, starts[rows][:, None], rows)
            else:
                end = row + 1
                for first in range(starts[row], starts[end], self._chunks[-1]):
                    last = min(first + self._chunks[-1], starts[end])
                    tokens = np.arange(first, last)[None]
                    self._fill(hidden, token_ids, context, tokens, np.array([row]))
            row = end
        rows = context.logits_rows
        return torch.from_numpy(hidden if rows is None else hidden[rows.numpy()])

    def _fill(
        self,
        hidden: NDArray[np.float32],
        token_ids: Tensor,
        context: AttentionMetadata,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Compute the hidden states of `tokens`, indices [S, Q], of the sequences `rows` [S]."""
        num_sequences, num_tokens = tokens.shape
        if num_tokens == 1:
            shape = next(size for size in self._decodes if size >= num_sequences), 1
        else:
            shape = 1, next(size for size in self._chunks if size >= num_tokens)
        # Padding repeats the last token, which reads what is there, and writes nothing.
        padding = [(0, shape[0] - num_sequences), (0, shape[1] - num_tokens)]
        width = self._table_width
        slots = np.full((len(context.groups), *shape), self._no_slot, dtype=np.int32)
        tables = np.zeros((len(context.groups), shape[0], width), dtype=np.int32)
        for index, group in enumerate(context.groups):
            slots[index, :num_sequences, :num_tokens] = group.slot_mapping.numpy()[tokens]
            blocks = group.block_tables.numpy()[rows, :width]
            tables[index, :, : blocks.shape[1]] = np.pad(blocks, [padding[0], (0, 0)], "edge")
        indices = np.pad(tokens, padding, "edge")
        result = self._run(
            token_ids.numpy()[indices].astype(np.int32),
            context.positions.numpy()[indices].astype(np.int32),
            slots,
            tables,
        )
        hidden[tokens] = result[:num_sequences, :num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size]."""
        most, parts = self._decodes[-1], []
        for first in range(0, len(hidden), most):
            rows = hidden[first : first + most].numpy()
            size = next(size for size in self._decodes if size >= len(rows))
            padded = np.pad(rows, [(0, size - len(rows)), (0, 0)])
            logits = compute_logits(self._shape, self._weights, padded)
            parts.append(np.asarray(logits)[: len(rows)])
        return torch.from_numpy(np.concatenate(parts))


class JaxDevice(Device):
    """This machine's CPUs, by JAX."""

    name: ClassVar[str] = "jax-cpu"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._model: JaxModel | None = None
        jax.config.update("jax_platforms", "cpu")
        if path := os.environ.get(_CACHE_PATH):
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(path))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    def make_kernels(self) -> KernelSet:
        return ReferenceKernels(why="JAX computes the model")

    @property
    def arithmetic(self) -> tuple[str, str]:
        return self.name, f"JAX {jax.__version__}, torch {torch.__version__}"

    def build_model(self, request: BuildRequest) -> LoadedImpl:
        require_native_decoder(request, self.name, unsupported_feature)
        if (name := request.config.quantization) in ONLINE_METHODS:
            raise ConfigError(
                f"quantization can't be {name} on the device {self.name}: its weights are floats.",
                param="quantization",
            )
        built, decoder = build_native_decoder(request, self.name)
        config = self.config
        budget = config.max_num_batched_tokens or self.token_budget
        self._model = JaxModel(decoder, config.max_num_seqs, budget)
        return dataclasses.replace(built, model=self._model)

    def on_step_failed(self) -> None:
        if self._model is not None and self._model.has_lost_cache:
            raise RuntimeError(
                "The program that failed had been given the KV cache, which is lost."
            )

    def num_blocks(self, need: CacheRequirements) -> int:
        return num_cpu_blocks(
            self.config, need.bytes_per_token, need.blocks_per_sequence, len(need.layout.groups)
        )

    def make_runner(self, parts: RunnerInputs) -> Runner:
        sampler = Sampler(parts.loaded.eos_token_ids, kernels_on("cpu", self.config))
        return ModelRunner(parts.loaded.model, parts.batch, sampler, masks=parts.masks)
