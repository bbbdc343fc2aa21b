"""`HeadWorker`: heads on the model's hidden states, on the same device."""

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
from engine.contract.speculative_config import OWN_LAYERS, SpeculativeConfig
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


def resolve_head_method(config: EngineConfig, wanted: SpeculativeConfig) -> SpeculativeConfig:
    """`wanted` with the method that the checkpoint is for, where a model alone was named.

    Raises `ConfigError` for a method that isn't run.
    """
    if wanted.method != "draft_model":
        return wanted
    try:
        folder = resolve_folder(draft_config(config, wanted))
        found = method_of(read_config(folder), wanted.model)
    except QuireError:
        return wanted  # whoever loads it says what is wrong
    return replace(wanted, method=found) if found else wanted


class HeadWorker:
    """Loads heads, and draws drafts from the hidden states that the runner keeps.

    Raises `ConfigError` or `ModelLoadError` where they can't be heads of `target`.
    """

    def __init__(
        self, config: EngineConfig, wanted: SpeculativeConfig, device: Device, target: LoadedModel
    ) -> None:
        if not isinstance(target.model, NativeDecoder):
            raise ConfigError(
                f"{_PARAM}: method={wanted.method} needs a model that runs on Quire's own decoder; "
                f"this {target.spec.architecture} doesn't.",
                param=_PARAM,
            )
        if wanted.quantization not in (None, *device.kernels.quantizations):
            raise ConfigError(
                f"{_PARAM}: quantization of heads must be one of "
                f"{', '.join(device.kernels.quantizations)}; got {wanted.quantization!r}.",
                param=_PARAM,
            )
        self._config = draft_config(config, wanted) if wanted.model else config
        self._wanted = wanted
        self._device, self._target, self._size = device, target, config.block_size
        self._heads: DraftHeads | LayerDraftHeads | None = self._load()
        self._batch: InputBatch | None = None
        self._hidden: HiddenStateStore | None = None
        self._drawer: HeadSampler | None = None
        #: Row -> the parameters of its sequence, and what drafts follow of them.
        self._sampling: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        whole = isinstance(self._heads, LayerDraftHeads)
        # Without heads the last layer may compute a prompt's last token alone; taps come before it.
        more = whole and not device.returns_all_hidden_states and not self.taps
        part = 1.0 / target.spec.num_layers if more else 0.0
        self.facts = HeadFacts(self._heads.max_drafts, wanted.max_model_len, whole, part)

    def _load(self) -> DraftHeads | LayerDraftHeads:
        target, method = self._target, self._wanted.method
        kept = self._device.kernels, target.dtype, self._wanted.quantization
        try:
            folder = resolve_folder(self._config)
            whole = TargetModel(cast(NativeDecoder, target.model), target.max_model_len)
            if method == OWN_LAYERS:
                return self._load_own(folder, whole)
            if method in LAYER_METHODS:
                return load_layer_heads(method, folder, whole, *kept)
            sizes = target.spec.hidden_size, target.spec.vocab_size
            return load_heads(method, folder, sizes, *kept)
        except QuireError as error:
            raise type(error)(f"{_PARAM}: {error.message}", param=_PARAM) from error

    def _load_own(self, folder: Path, target: TargetModel) -> Mtp:
        """The layer for drafts of the model's own checkpoint, rounded as that is, or of another."""
        config = self._config
        raw = apply_overrides(read_config(folder), config)
        found = resolve_quantization(folder, raw, config)
        scheme = make_quant_scheme(
            self._wanted.quantization or found.rounds, config.round_activations
        )
        weights = open_weights(folder, config, self._device.kernels.device, found.form)
        source = MtpSource(folder, raw, weights, self._target.dtype, scheme)
        try:
            heads = Mtp(source, target)
        finally:
            weights.close()
        log.info("%s: a layer of %d MB", OWN_LAYERS, heads.nbytes >> 20)
        return heads

    @property
    def bytes_per_token(self) -> int:
        """What a token takes beside the model's own cache: its entry, and a part of a state."""
        heads = self._heads
        if not isinstance(heads, LayerDraftHeads):
            return 0
        states = -(-heads.width * self._kept.itemsize // self._size)
        return heads.layer.token_size * self._target.dtype.itemsize + states

    @property
    def _kept(self) -> torch.dtype:
        """Of the states that a layer goes on from: what its activations are."""
        return self._device.kernels.activation_dtype(self._target.dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers whose inputs they read."""
        return self._heads.taps if isinstance(self._heads, LayerDraftHeads) else ()

    def check(self, layout: KVCacheConfig) -> None:
        """Raise `ConfigError` where the model's cache keeps no token that a layer sees for good."""
        if isinstance(self._heads, LayerDraftHeads) and 0 not in layout.windows:
            raise ConfigError(
                f"{_PARAM}: method={self._wanted.method} needs a model with full attention in some "
                "layers; all of this one's have sliding windows.",
                param=_PARAM,
            )

    def attach(self, batch: InputBatch, num_blocks: int, layout: KVCacheConfig) -> HiddenStateStore:
        """Draw for this batch from here on; what its runner is to keep.

        `num_blocks`, `layout`: of the model's cache.
        """
        if self._heads is None:
            raise RuntimeError("The heads sleep.")
        ops = self._device.kernels
        ends = self._target.eos_token_ids
        sampler = Sampler(ends, None if ops.name == "reference" else ops)
        self._drawer = HeadSampler(sampler, ends, ops.device)
        self._batch, self._sampling = batch, {}
        if isinstance(self._heads, LayerDraftHeads):
            group, most = layout.windows.index(0), self._wanted.num_speculative_tokens
            dtype = self._target.dtype
            self._hidden = DraftHeadCache(
                self._heads, batch, group, num_blocks, dtype, most, ops.device, self._kept,
                vocab_size=self._target.spec.vocab_size,
            )  # fmt: skip
        else:
            hidden = self._target.spec.hidden_size
            self._hidden = LastHiddenStates(self._heads, batch, hidden, ops.device)
        return self._hidden

    def propose(self, plan: HeadPlan) -> HeadResult:
        """Drafts of sequences that the batch holds."""
        batch, hidden, drawer = self._batch, self._hidden, self._drawer
        if batch is None or hidden is None or drawer is None:
            raise RuntimeError("There is no batch to draw for.")
        found = [hidden.row_of(seq_id) for seq_id in plan.seq_ids]
        result = HeadResult([[] for _ in found])
        result.lost = [seq_id for seq_id in plan.seq_ids if not hidden.is_tracked(seq_id)]
        places = [at for at, row in enumerate(found) if row is not None]
        rows = [row for row in found if row is not None]
        if rows:
            started = time.perf_counter()
            hidden.process_pending()
            result.reading = time.perf_counter() - started
            newest = batch.tokens[rows, batch.num_tokens[rows] - 1]
            tokens = replace_adapter_tokens(newest, self._target.spec.vocab_size).tolist()
            states = [self._state(batch, row) for row in rows]
            counts = [plan.counts[at] for at in places]
            drawn = drawer.draw(hidden.start_draft_rounds(rows), tokens, states, counts)
            for at, drafts in zip(places, drawn, strict=True):
                result.drafts[at] = drafts
        return result

    def _state(self, batch: InputBatch, row: int) -> RequestSamplingState:
        """What drafts of a row are drawn by: a copy, which goes on with them."""
        own = batch.state(row)
        known = self._sampling.get(row)
        if known is None or known[0] is not own.params:
            followed = draft_sampling(own.params, self._target.spec.vocab_size)
            known = self._sampling[row] = own.params, followed
        return RequestSamplingState(
            known[1], own.prompt_token_ids, list(own.output_token_ids), own.seed
        )

    def sleep(self, level: int) -> None:
        """Give memory back, as `Executor.sleep`: at level 2 the weights too."""
        self._batch = self._hidden = self._drawer = None
        if level == 2:
            self._heads = None

    def wake_weights(self) -> None:
        """Bring the weights back, if they sleep."""
        if self._heads is None:
            self._heads = self._load()
