"""`HeadWorker`: draft heads on the model's hidden states, on the same device."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from engine.checkpoints.load_format import open_weights
from engine.checkpoints.model_files import apply_overrides
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, QuireError
from engine.contract.sampling_params import SamplingParams
from engine.contract.speculative_config import MTP, SpeculativeConfig
from engine.devices.device import Device
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.model_loader.loader import LoadedModel, resolve_folder
from engine.model_loader.model_impl import resolve_quantization
from engine.models.decoder import NativeDecoder
from engine.models.registry import read_config
from engine.quantization.packing import make_quant_scheme
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler
from engine.speculative.draft_model import draft_sampling
from engine.speculative.heads import LAYER_METHODS, load_heads, load_layer_heads, method_of
from engine.speculative.heads.base import DraftHeads, HeadSampler
from engine.speculative.heads.layer import LayerDraftHeads, TargetModel
from engine.speculative.heads.mtp import Mtp, MtpSource
from engine.speculative.interface import HeadFacts, HeadPlan, HeadResult, draft_config
from engine.worker.draft_head_cache import DraftHeadCache, replace_adapter_tokens
from engine.worker.hidden_states import HiddenStateStore, LastHiddenStates
from engine.worker.input_batch import InputBatch

log = logging.getLogger(__name__)

_PARAM = "speculative_config"


def resolve_head_method(config: EngineConfig, requested: SpeculativeConfig) -> SpeculativeConfig:
    """`requested` with the method of its checkpoint, if only a model was named.

    Raises `ConfigError` for an unsupported method.
    """
    if requested.method != "draft_model":
        return requested
    try:
        folder = resolve_folder(draft_config(config, requested))
        method = method_of(read_config(folder), requested.model)
    except QuireError:
        return requested  # loading it raises the error
    return replace(requested, method=method) if method else requested


class HeadWorker:
    """Loads heads, and drafts from the hidden states that the runner saves.

    Raises `ConfigError` or `ModelLoadError` if the heads don't fit `target`.
    """

    def __init__(
        self,
        config: EngineConfig,
        requested: SpeculativeConfig,
        device: Device,
        target: LoadedModel,
    ) -> None:
        if not isinstance(target.model, NativeDecoder):
            raise ConfigError(
                f"{_PARAM}: method={requested.method} needs a model that runs on Quire's own "
                f"decoder; this {target.spec.architecture} doesn't.",
                param=_PARAM,
            )
        if requested.quantization not in (None, *device.kernels.quantizations):
            raise ConfigError(
                f"{_PARAM}: quantization of heads must be one of "
                f"{', '.join(device.kernels.quantizations)}; got {requested.quantization!r}.",
                param=_PARAM,
            )
        self._config = draft_config(config, requested) if requested.model else config
        self._settings = requested
        self._device, self._target, self._size = device, target, config.block_size
        self._heads: DraftHeads | LayerDraftHeads | None = self._load()
        self._batch: InputBatch | None = None
        self._hidden: HiddenStateStore | None = None
        self._sampler: HeadSampler | None = None
        #: Row -> its sequence's parameters, and the drafting state derived from them.
        self._sampling: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        reads_tokens = isinstance(self._heads, LayerDraftHeads)
        # Without heads the last layer may compute only a prompt's last token; taps are before it.
        extra_layer = reads_tokens and not device.returns_all_hidden_states and not self.taps
        self.facts = HeadFacts(
            max_drafts=self._heads.max_drafts,
            max_model_len=requested.max_model_len,
            reads_tokens=reads_tokens,
            cost_fraction=1.0 / target.spec.num_layers if extra_layer else 0.0,
        )

    def _load(self) -> DraftHeads | LayerDraftHeads:
        target, method = self._target, self._settings.method
        form = self._device.kernels, target.dtype, self._settings.quantization
        try:
            folder = resolve_folder(self._config)
            model = TargetModel(cast(NativeDecoder, target.model), target.max_model_len)
            if method == MTP:
                return self._load_mtp(folder, model)
            if method in LAYER_METHODS:
                return load_layer_heads(method, folder, model, *form)
            sizes = target.spec.hidden_size, target.spec.vocab_size
            return load_heads(method, folder, sizes, *form)
        except QuireError as error:
            raise type(error)(f"{_PARAM}: {error.message}", param=_PARAM) from error

    def _load_mtp(self, folder: Path, target: TargetModel) -> Mtp:
        """The draft layer of the model's checkpoint, quantized like the model, or of another
        one.
        """
        config = self._config
        raw = apply_overrides(read_config(folder), config)
        quantization = resolve_quantization(folder, raw, config)
        scheme = make_quant_scheme(
            self._settings.quantization or quantization.rounds, config.round_activations
        )
        weights = open_weights(folder, config, self._device.kernels.device, quantization.form)
        source = MtpSource(folder, raw, weights, self._target.dtype, scheme)
        try:
            heads = Mtp(source, target)
        finally:
            weights.close()
        log.info("%s: a layer of %d MB", MTP, heads.nbytes >> 20)
        return heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in addition to the model's cache: its entry, and a part of a state."""
        heads = self._heads
        if not isinstance(heads, LayerDraftHeads):
            return 0
        states = -(-heads.width * self._state_dtype.itemsize // self._size)
        return heads.layer.token_size * self._target.dtype.itemsize + states

    @property
    def _state_dtype(self) -> torch.dtype:
        """dtype of the states from which a layer continues: that of its activations."""
        return self._device.kernels.activation_dtype(self._target.dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers whose inputs the heads read."""
        return self._heads.taps if isinstance(self._heads, LayerDraftHeads) else ()

    def check(self, layout: KVCacheConfig) -> None:
        """Raise `ConfigError` unless some layer of the model attends to all tokens."""
        if isinstance(self._heads, LayerDraftHeads) and 0 not in layout.windows:
            raise ConfigError(
                f"{_PARAM}: method={self._settings.method} needs a model with full attention in "
                "some layers; all of this one's have sliding windows.",
                param=_PARAM,
            )

    def attach(self, batch: InputBatch, num_blocks: int, layout: KVCacheConfig) -> HiddenStateStore:
        """Start drafting for this batch; returns the store of states that its runner fills.

        `num_blocks`, `layout`: of the model's cache.
        """
        if self._heads is None:
            raise RuntimeError("The heads sleep.")
        ops = self._device.kernels
        eos = self._target.eos_token_ids
        self._sampler = HeadSampler(Sampler(eos, ops), eos, ops.device)
        self._batch, self._sampling = batch, {}
        if isinstance(self._heads, LayerDraftHeads):
            group, max_drafts = layout.windows.index(0), self._settings.num_speculative_tokens
            dtype = self._target.dtype
            self._hidden = DraftHeadCache(
                self._heads, batch, group, num_blocks, dtype, max_drafts, ops.device,
                self._state_dtype, vocab_size=self._target.spec.vocab_size,
            )  # fmt: skip
        else:
            hidden = self._target.spec.hidden_size
            self._hidden = LastHiddenStates(self._heads, batch, hidden, ops.device)
        return self._hidden

    def propose(self, plan: HeadPlan) -> HeadResult:
        """Drafts for sequences of the batch."""
        batch, hidden, sampler = self._batch, self._hidden, self._sampler
        if batch is None or hidden is None or sampler is None:
            raise RuntimeError("There is no batch to draw for.")
        rows_of_plan = [hidden.row_of(seq_id) for seq_id in plan.seq_ids]
        result = HeadResult([[] for _ in rows_of_plan])
        result.lost = [seq_id for seq_id in plan.seq_ids if not hidden.is_tracked(seq_id)]
        indices = [index for index, row in enumerate(rows_of_plan) if row is not None]
        rows = [row for row in rows_of_plan if row is not None]
        if rows:
            started = time.perf_counter()
            hidden.process_pending()
            result.reading = time.perf_counter() - started
            newest = batch.tokens[rows, batch.num_tokens[rows] - 1]
            tokens = replace_adapter_tokens(newest, self._target.spec.vocab_size).tolist()
            states = [self._state(batch, row) for row in rows]
            counts = [plan.counts[index] for index in indices]
            drawn = sampler.draw(hidden.start_draft_rounds(rows), tokens, states, counts)
            for index, drafts in zip(indices, drawn, strict=True):
                result.drafts[index] = drafts
        return result

    def _state(self, batch: InputBatch, row: int) -> RequestSamplingState:
        """The sampling state of a row's drafts: a copy, which drafting extends."""
        state = batch.state(row)
        cached = self._sampling.get(row)
        if cached is None or cached[0] is not state.params:
            params = draft_sampling(state.params, self._target.spec.vocab_size)
            cached = self._sampling[row] = state.params, params
        return RequestSamplingState(
            cached[1], state.prompt_token_ids, list(state.output_token_ids), state.seed
        )

    def sleep(self, level: int) -> None:
        """Release memory, as `Executor.sleep`: at level 2 also the weights."""
        self._batch = self._hidden = self._sampler = None
        if level == 2:
            self._heads = None

    def wake_weights(self) -> None:
        """Load the weights again, if they sleep."""
        if self._heads is None:
            self._heads = self._load()
