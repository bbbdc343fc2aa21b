"""`DraftWorker`: a draft model on the same device as the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, QuireError
from engine.contract.messages import KV_CACHE
from engine.contract.speculative_config import HEADS, SpeculativeConfig
from engine.devices.device import DRAFT_CACHE_DIVISOR, CacheRequirements, Device, RunnerInputs
from engine.executor.head_worker import HeadWorker, resolve_head_method
from engine.executor.sleep import SleepController
from engine.kv_cache.kv_cache_config import (
    KVCacheConfig,
    make_kv_cache_config,
    with_cross_attention,
)
from engine.model_loader.loader import LoadedModel, load_model
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoder_decoder import EncoderDecoder
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.interface import DraftFacts, HeadFacts, HeadPlan, HeadResult, draft_config
from engine.text.tokenizer import Tokenizer
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox, Runner

_PARAM = "speculative_config"
#: Maximum number of tokens that it processes per step.
_MAX_STEP_TOKENS = 2048


class DraftWorker:
    """Loads a draft model and runs steps of it, one at a time.

    It has a separate KV cache with those of the model's tokens that it has processed, which takes
    no blocks from the model's requests. If its blocks don't suffice, there are fewer drafts, and
    nothing waits.

    Raises `ConfigError` or `ModelLoadError` if it can't draft for `target`.
    """

    def __init__(
        self,
        config: EngineConfig,
        speculative: SpeculativeConfig,
        device: Device,
        target: LoadedModel,
    ) -> None:
        self._device, self._target = device, target
        self._config = draft_config(config, speculative)
        try:
            self.loaded = load_model(self._config, device.kernels, lambda done, total: None)
        except QuireError as error:
            raise type(error)(f"{_PARAM}: {error.message}", param=_PARAM) from error
        check_draft(self.loaded, target)
        self._share_encoder()
        longest = min(self.loaded.max_model_len, target.max_model_len)
        self._max_model_len = min(longest, speculative.max_model_len or longest)
        self._layout = self._make_layout()
        self._num_blocks = self._num_target_blocks = 0
        self._sleeper = SleepController(self.loaded, self._config, device)
        self._runner: Runner = cast(Any, None)

    @property
    def facts(self) -> DraftFacts:
        """The facts that the engine core plans with."""
        return DraftFacts(
            max_model_len=self._max_model_len,
            vocab_size=min(self.loaded.spec.vocab_size, self._target.spec.vocab_size),
            num_blocks=self._num_blocks,
            layout=self._layout,
            token_budget=self._token_budget,
        )

    @property
    def cache_requirements(self) -> CacheRequirements:
        """Memory that it needs in addition to the model."""
        loaded, size = self.loaded, self._config.block_size
        layout = self._layout
        return CacheRequirements(
            loaded,
            loaded.dtype,
            layout,
            max(1, loaded.spec.kv_bytes_per_token(loaded.dtype.itemsize)),
            layout.max_blocks(self._max_model_len, self._token_budget, size),
            self._token_budget,
        )

    @property
    def _token_budget(self) -> int:
        """Token budget of a step: prompts are processed while no request is served."""
        return min(self._device.token_budget, _MAX_STEP_TOKENS)

    def size_cache(self, num_blocks: int, block_bytes: int) -> None:
        """Size its cache relative to the model's of `num_blocks` blocks, `block_bytes` each: as
        many tokens, in at most a quarter of the bytes, but enough for one sequence.
        """
        need = self.cache_requirements
        draft_block_bytes, one = (
            need.bytes_per_token * self._config.block_size,
            need.blocks_per_sequence,
        )
        share = max(num_blocks * block_bytes // DRAFT_CACHE_DIVISOR // draft_block_bytes, one)
        self._num_blocks = min(share, num_blocks, one * self._config.max_num_seqs)
        self._num_target_blocks = num_blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes in addition to the model's cache, per token of that: of an encoder's states."""
        if not isinstance(self.loaded.model, EncoderDecoder):
            return 0
        return self.loaded.spec.kv_bytes_per_token(self.loaded.dtype.itemsize)

    def allocate_cache(self) -> None:
        """Allocate the cache; from now on steps can be run."""
        layout, size, model = self._layout, self._config.block_size, self.loaded.model
        model.allocate_kv(self._num_blocks, size, self.loaded.dtype, layout)
        if isinstance(model, EncoderDecoder) and isinstance(self._target.model, EncoderDecoder):
            model.allocate_states(self._num_target_blocks, size, self.loaded.dtype)
            layout = with_cross_attention(layout, model.encoder_length)
            self._target.model.draft = model
        batch = InputBatch(self._config.max_num_seqs, self._max_model_len, size, layout)
        parts = RunnerInputs(
            self.loaded, batch, BitmaskInbox(), layout, self._token_budget, is_draft=True
        )
        self._runner = self._device.make_runner(parts)
        self._sleeper.asleep.discard(KV_CACHE)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self._runner.execute(plan)

    def sleep(self, level: int) -> None:
        """Release memory, as `Executor.sleep`; all of its sequences are lost."""
        self._runner = cast(Any, None)
        self._sleeper.sleep(level)

    def wake_weights(self) -> None:
        """Load the weights again, if they sleep."""
        self._sleeper.reload_weights()
        self._share_encoder()

    def _share_encoder(self) -> None:
        """Remove the draft model's encoder: it gets the states of the model's."""
        if isinstance(self.loaded.model, EncoderDecoder):
            self.loaded.model.remove_encoder()

    def _make_layout(self) -> KVCacheConfig:
        spec, num_states = self.loaded.spec, None
        if not isinstance(spec, DecoderSpec):
            return make_kv_cache_config((), spec.num_layers, self._max_model_len)
        layout = make_kv_cache_config((), len(spec.attention_layers), self._max_model_len)
        if spec.states is not None:
            num_states = self._device.max_states(spec.state_bytes)
        if num_states is None:
            return layout
        # Each row's state after its drafts, and the one before them.
        return layout.with_states(2 * min(self._config.max_num_seqs, max(1, num_states // 2)))


def check_draft(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise `ConfigError` for a model whose token ids differ from the target's."""
    name, why = draft.spec.architecture, ""
    if draft.pooler is not None:
        why = f"{name} generates no text"
    elif draft.model.stateful and not isinstance(draft.model, NativeDecoder):
        why = f"the state of {name} can't be taken back to where a draft failed"
    elif not hasattr(draft.model, "release_kv"):
        why = f"{type(draft.model).__name__} has no release_kv"
    else:
        why = _encoder_mismatch(draft, target) or first_vocabulary_mismatch(draft, target)
    if why:
        raise ConfigError(f"{_PARAM}: the draft model can't be used: {why}.", param=_PARAM)


def _encoder_mismatch(draft: LoadedModel, target: LoadedModel) -> str:
    """Why a draft model can't read the states of the target's encoder, as a clause; "": it can, or
    neither has an encoder.
    """
    models = [one.model for one in (draft, target) if isinstance(one.model, EncoderDecoder)]
    if not models:
        return ""
    if len(models) == 1:
        names = draft.spec.architecture, target.spec.architecture
        return f"{names[0]} and {names[1]} don't both attend to an encoder's states"
    (hidden, length), (their_hidden, their_length) = (
        (model.spec.hidden_size, model.encoder_length) for model in models
    )
    if hidden == their_hidden and length >= their_length:
        return ""
    return (
        f"it attends to {length} states of {hidden} values, the model's encoder has {their_length} "
        f"of {their_hidden}"
    )


def first_vocabulary_mismatch(draft: LoadedModel, target: LoadedModel) -> str:
    """The first token whose ids differ between the two, as a clause; "": there is none.

    Without tokenizers (`skip_tokenizer_init`) only the sizes are compared.
    """
    ours, theirs = target.read_tokenizer(), draft.read_tokenizer()
    if ours is None or theirs is None:
        sizes = draft.spec.vocab_size, target.spec.vocab_size
        if sizes[0] == sizes[1]:
            return ""
        return f"its vocabulary has {sizes[0]} tokens, the model's {sizes[1]}"
    return _first_difference(ours, theirs)


def _first_difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    for token_id in range(max(ours.vocab_size, theirs.vocab_size)):
        our_text, their_text = ours.id_to_piece(token_id), theirs.id_to_piece(token_id)
        if our_text != their_text:
            return (
                f"token {token_id} is {their_text!r} in its vocabulary and {our_text!r} in the "
                "model's"
            )
    return ""


class DraftWorkers:
    """See `DraftHost`: the draft model or heads of the settings, if there are any.

    Attributes:
        of_model, of_heads: the workers; at most one of the two is set.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        """`begin`: called before each step, in the thread that runs it."""
        self._begin = begin
        self.of_model: DraftWorker | None = None
        self.of_heads: HeadWorker | None = None

    def load(
        self,
        config: EngineConfig,
        device: Device,
        loaded: LoadedModel,
        *,
        overlaps: bool,
        is_first_rank: bool = True,
    ) -> None:
        """Load what the settings name in addition to `loaded`, if drafts can be verified.

        `overlaps`: steps may be planned before their tokens are known. `is_first_rank`: other ranks
        have no draft model, because plans contain the drafts' tokens. Raises `ConfigError` or
        `ModelLoadError`.
        """
        if config.speculative_config is None or config.uses_async_scheduling(overlaps):
            return
        speculative = SpeculativeConfig.from_mapping(config.speculative_config)
        facts = loaded.facts
        verifies = facts.states_in_blocks or not facts.stateful
        if not speculative.computes or facts.pooling is not None or not verifies:
            return
        speculative = resolve_head_method(config, speculative)
        _check_device(device, speculative.method)
        if speculative.method in HEADS:
            self.of_heads = HeadWorker(config, speculative, device, loaded)
        elif is_first_rank:
            self.of_model = DraftWorker(config, speculative, device, loaded)

    @property
    def model(self) -> DraftFacts | None:
        """See `DraftHost`."""
        return None if self.of_model is None else self.of_model.facts

    @property
    def heads(self) -> HeadFacts | None:
        """See `DraftHost`."""
        return None if self.of_heads is None else self.of_heads.facts

    def execute(self, plan: StepPlan) -> StepResult:
        """See `DraftHost`."""
        if self.of_model is None:
            raise RuntimeError("There is no draft model.")
        self._begin()
        return self.of_model.execute(plan)

    def propose(self, plan: HeadPlan) -> HeadResult:
        """See `DraftHost`."""
        if self.of_heads is None:
            raise RuntimeError("There are no heads.")
        return self.of_heads.propose(plan)

    def check(self, layout: KVCacheConfig) -> None:
        """Raise `ConfigError` unless the heads support the layout of the model's cache."""
        if self.of_heads is not None:
            self.of_heads.check(layout)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in addition to the model's cache."""
        worker = self.of_heads or self.of_model
        return 0 if worker is None else worker.bytes_per_token

    @property
    def need(self) -> CacheRequirements | None:
        """Bytes of the draft model's separate cache."""
        return None if self.of_model is None else self.of_model.cache_requirements

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers whose inputs heads read."""
        return () if self.of_heads is None else self.of_heads.taps

    def size_cache(self, num_blocks: int, block_bytes: int) -> None:
        """See `DraftWorker.size_cache`."""
        if self.of_model is not None:
            self.of_model.size_cache(num_blocks, block_bytes)

    def allocate_cache(self) -> None:
        """Allocate the draft model's cache."""
        if self.of_model is not None:
            self.of_model.allocate_cache()

    def attach(
        self, batch: InputBatch, num_blocks: int, layout: KVCacheConfig
    ) -> HiddenStateStore | None:
        """See `HeadWorker.attach`; None: there are no states to save."""
        if self.of_heads is None:
            return None
        return self.of_heads.attach(batch, num_blocks, layout)

    def sleep(self, level: int) -> None:
        """Release memory, as `Executor.sleep`."""
        for worker in (self.of_model, self.of_heads):
            if worker is not None:
                worker.sleep(level)

    def wake_weights(self) -> None:
        """Load the weights again, if they sleep."""
        for worker in (self.of_model, self.of_heads):
            if worker is not None:
                worker.wake_weights()


def _check_device(device: Device, method: str) -> None:
    """Raise `ConfigError` if the device doesn't support this way of drafting."""
    if method in device.draft_head_methods or (method not in HEADS and device.runs_draft_models):
        return
    draft_models: tuple[str, ...] = ("draft_model",) if device.runs_draft_models else ()
    *methods, last = "ngram", "suffix", *draft_models, *device.draft_head_methods
    raise ConfigError(
        f"speculative_config: drafts by {method} aren't supported on the device {device.name}; the "
        f"methods {', '.join(methods)} and {last} are.",
        param="speculative_config",
    )
