"""`DraftExecutor`: a draft model beside the model, on the same device."""

from __future__ import annotations

from typing import Any, cast

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError, QuireError
from engine.contract.protocol import KV_CACHE
from engine.contract.speculative import SpeculativeConfig
from engine.devices.device import DRAFT_PART, CacheNeed, Device, RunnerParts
from engine.executor.sleep import Sleeper
from engine.kv_cache.layout import KVLayout, make_layout, most_blocks
from engine.model_loader.loader import LoadedModel, load_model
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.draft_facts import DraftFacts
from engine.text.tokenizer import Tokenizer
from engine.worker.batch import RunningBatch
from engine.worker.grammar_inbox import GrammarInbox
from engine.worker.interface import Runner

_PARAM = "speculative_config"
#: Tokens that it reads in a step, at most.
_MOST_TOKENS = 2048
#: Settings of the model that hold for its draft, too.
_SHARED = (
    "device", "dtype", "block_size", "max_num_seqs", "num_threads", "cpu_threads_bind",
    "cpu_kernels", "round_activations", "trust_remote_code", "batch_invariant", "download_dir",
    "skip_tokenizer_init",
)  # fmt: skip


class DraftExecutor:
    """Loads a draft model and runs steps of it, one at a time.

    Its KV cache is its own: of the model's tokens it holds those that it has read, which is fewer,
    and it takes no block from the model's requests. Where it is short of blocks there are fewer
    drafts, and nothing waits.

    Raises `ConfigError` or `ModelLoadError` where it can't be a draft of `target`.
    """

    def __init__(
        self, config: EngineConfig, wanted: SpeculativeConfig, device: Device, target: LoadedModel
    ) -> None:
        self._device, self._target = device, target
        self._config = draft_config(config, wanted)
        try:
            self.loaded = load_model(self._config, device.kernels, lambda done, total: None)
        except QuireError as error:
            raise type(error)(f"{_PARAM}: {error.message}", param=_PARAM) from error
        check_draft(self.loaded, target)
        longest = min(self.loaded.max_model_len, target.max_model_len)
        self._max_model_len = min(longest, wanted.max_model_len or longest)
        self._num_blocks = 0
        self._sleeper = Sleeper(self.loaded, self._config, device)
        self._runner: Runner = cast(Any, None)

    @property
    def facts(self) -> DraftFacts:
        """What the core plans with."""
        return DraftFacts(
            max_model_len=self._max_model_len,
            vocab_size=min(self.loaded.spec.vocab_size, self._target.spec.vocab_size),
            num_blocks=self._num_blocks,
            layout=self._layout(),
            token_budget=self._token_budget,
        )

    @property
    def need(self) -> CacheNeed:
        """What it asks for, beside the model."""
        loaded, size = self.loaded, self._config.block_size
        one = most_blocks(0, self._max_model_len, self._max_model_len, size)
        own = loaded.spec.kv_bytes_per_token(loaded.dtype.itemsize)
        layout = self._layout()
        return CacheNeed(loaded, loaded.dtype, layout, max(1, own), one, self._token_budget)

    @property
    def _token_budget(self) -> int:
        """Of a step: a prompt is read while nobody else is served."""
        return min(self._device.token_budget, _MOST_TOKENS)

    def size_cache(self, num_blocks: int, block_bytes: int) -> None:
        """Take a share beside the model's cache of `num_blocks` blocks, `block_bytes` each: as many
        tokens, in at most a quarter as many bytes, but enough for one sequence.
        """
        need = self.need
        own, one = need.bytes_per_token * self._config.block_size, need.blocks_per_sequence
        share = max(num_blocks * block_bytes // DRAFT_PART // own, one)
        self._num_blocks = min(share, num_blocks, one * self._config.max_num_seqs)

    def allocate_cache(self) -> None:
        """Make the cache; from now on steps can be run."""
        layout, size = self._layout(), self._config.block_size
        self.loaded.model.allocate_kv(self._num_blocks, size, self.loaded.dtype, layout)
        batch = RunningBatch(self._config.max_num_seqs, self._max_model_len, size)
        parts = RunnerParts(
            self.loaded, batch, GrammarInbox(), layout, self._token_budget, is_draft=True
        )
        self._runner = self._device.make_runner(parts)
        self._sleeper.asleep.discard(KV_CACHE)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self._runner.execute(plan)

    def sleep(self, level: int) -> None:
        """Give memory back, as `Executor.sleep`; all of its sequences are lost."""
        self._runner = cast(Any, None)
        self._sleeper.sleep(level)

    def wake_weights(self) -> None:
        """Bring the weights back, if they sleep."""
        self._sleeper.wake_weights()

    def _layout(self) -> KVLayout:
        spec = self.loaded.spec
        return make_layout((), spec.num_layers, self._max_model_len)


def draft_config(config: EngineConfig, wanted: SpeculativeConfig) -> EngineConfig:
    """The settings of the draft beside a model with `config`."""
    shared = {name: getattr(config, name) for name in _SHARED}
    return EngineConfig(
        model=wanted.model, quantization=wanted.quantization, enable_lora=False, **shared
    )


def check_draft(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise `ConfigError` for a model whose tokens can't stand for the target's."""
    name, why = draft.spec.architecture, ""
    if draft.pooler is not None:
        why = f"{name} generates no text"
    elif draft.model.stateful:
        why = f"the state of {name} can't be taken back to where a draft failed"
    elif not hasattr(draft.model, "release_kv"):
        why = f"{type(draft.model).__name__} has no release_kv"
    else:
        why = vocabulary_difference(draft, target)
    if why:
        raise ConfigError(f"{_PARAM}: the draft model can't be used: {why}.", param=_PARAM)


def vocabulary_difference(draft: LoadedModel, target: LoadedModel) -> str:
    """The first token that the two know by different ids, as a clause; "": there is none.

    Without tokenizers (`skip_tokenizer_init`) the sizes alone are compared.
    """
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        sizes = draft.spec.vocab_size, target.spec.vocab_size
        if sizes[0] == sizes[1]:
            return ""
        return f"its vocabulary has {sizes[0]} tokens, the model's {sizes[1]}"
    return _differing_piece(ours, theirs)


def _differing_piece(ours: Tokenizer, theirs: Tokenizer) -> str:
    for token_id in range(max(ours.vocab_size, theirs.vocab_size)):
        own, other = ours.id_to_piece(token_id), theirs.id_to_piece(token_id)
        if own != other:
            return f"token {token_id} is {other!r} in its vocabulary and {own!r} in the model's"
    return ""
