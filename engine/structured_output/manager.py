"""`StructuredOutputManager`: the engine core's interface to grammars.

All calls come from one thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from concurrent.futures import Future

from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.reasoning import ReasoningPhase, ReasoningState
from engine.scheduler.plan import GrammarOutput, StepPlan
from engine.scheduler.request import Request, Sequence, SequenceStatus
from engine.structured_output.backend_llguidance import BadGrammar, Vocabulary, words_for
from engine.structured_output.bitmask import BitmaskBuilder, BitmaskRow
from engine.structured_output.compile_pool import CompileJob, CompilePool, Limits
from engine.structured_output.grammar import CompiledGrammar, GrammarState, GrammarVocabulary
from engine.structured_output.grammar_spec import make_grammar_spec
from engine.structured_output.vocabulary import PARAM, GrammarCache, Vocabularies, source_of
from engine.text.tokenizer import Tokenizer


class StructuredOutputManager:
    """Grammars of the requests in the engine: cached, being compiled, in use.

    Threads and processes start with the first request that needs them.

    Args:
        tokenizer: None if the engine runs on token ids alone; then structured output is refused.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end an output; without any, structured output is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: Limits | None = None,
    ) -> None:
        self.cache = GrammarCache()
        self.limits = limits or Limits()
        self._vocabularies = Vocabularies(tokenizer, vocab_size, eos_token_ids)
        self._eos = self._vocabularies.eos_token_ids
        self._compiler: CompilePool | None = None
        self._masks: BitmaskBuilder | None = None
        self._waiting: dict[str, tuple[Request, CompileJob]] = {}
        #: State of each sequence's grammar, by sequence id; it survives a preemption.
        self.states: dict[int, GrammarState] = {}
        self._sequences: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        """Number of requests whose grammar is being compiled."""
        return len(self._waiting)

    @property
    def has_pending(self) -> bool:
        """Whether `poll_ready` may return something."""
        return bool(self._waiting)

    is_preparing = has_pending

    def admit(self, request: Request) -> bool:
        """Assign a grammar to a new request's sequences; False if it must be compiled first.

        Raises:
            InvalidRequest: the grammar is known to be invalid, or this model doesn't support
            grammars. EngineOverloaded: too many grammars of this tenant are waiting.
        """
        params = request.message.sampling.structured_outputs
        if params is None:
            self._watch(request)
            return True
        spec, vocabulary = make_grammar_spec(params), source_of(request)
        outcome = self.cache.get(spec.key, vocabulary.key)
        if outcome is not None:
            self._begin(request, outcome)
            return True
        job = self._started_compiler().submit(spec, request.message.tenant, vocabulary)
        for sequence in request.sequences:
            sequence.status = SequenceStatus.WAITING_FOR_ADMISSION
        self._waiting[request.request_id] = (request, job)
        return False

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        """Requests whose grammar has been compiled, with the error if it couldn't be.

        Waits up to `timeout_s` for the first.
        """
        if not self._waiting:
            return []
        if timeout_s:
            self._started_compiler().line.wait(
                [job for _, job in self._waiting.values()], timeout_s
            )
        ready: list[tuple[Request, QuireError | None]] = []
        for request, job in list(self._waiting.values()):
            outcome = job.outcome
            if outcome is None:
                continue
            del self._waiting[request.request_id]
            if isinstance(outcome, QuireError):  # a later one may still be compiled
                ready.append((request, outcome))
                continue
            self.cache.put(job.spec.key, outcome, job.vocabulary.key)
            try:
                self._begin(request, outcome)
            except InvalidRequest as error:
                ready.append((request, error))
            else:
                ready.append((request, None))
        return ready

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has left the engine; with the last one also its request."""
        self.states.pop(sequence.seq_id, None)
        self._sequences.pop(sequence.seq_id, None)
        waiting = self._waiting.get(sequence.request.request_id)
        if waiting is not None and sequence.request.finished:
            del self._waiting[sequence.request.request_id]
            self._started_compiler().line.leave(waiting[1])

    def _begin(self, request: Request, outcome: CompiledGrammar | str) -> None:
        if isinstance(outcome, str):
            kind = request.message.sampling.structured_outputs
            raise InvalidRequest(
                f"The {kind.kind if kind else 'grammar'} of structured_outputs can't be used: "
                f"{outcome}.",
                param=PARAM,
                code="invalid_grammar",
            )
        sequences = [sequence for sequence in request.sequences if not sequence.finished]
        states: list[GrammarState] = []
        params = request.message.sampling.thinking
        for sequence in sequences:
            done = sequence.token_ids[sequence.num_prompt_tokens :]
            try:
                thinking = None if params is None else ReasoningState(params)
                states.append(outcome.new_state(done, thinking))
            except BadGrammar as error:
                raise InvalidRequest(
                    f"Output {sequence.index} can't go on: {error}.", param="resume_token_ids"
                ) from error
        for sequence, state in zip(sequences, states, strict=True):
            sequence.status = SequenceStatus.WAITING
            self._enter(sequence, state)

    def _enter(self, sequence: Sequence, state: GrammarState) -> None:
        self.states[sequence.seq_id] = state
        self._sequences[sequence.seq_id] = sequence

    def _watch(self, request: Request) -> None:
        """Track the reasoning of a request whose answer is unrestricted."""
        params = request.message.sampling.thinking
        if params is None or params.budget is None:
            return
        self._vocabularies.check()
        space = None
        if vocab_size := request.vocab_size:
            space = GrammarVocabulary(
                words_for(vocab_size), ()
            )  # no grammar restricts where an output may end
        for sequence in request.sequences:
            state = GrammarState(None, ReasoningState(params), space)
            state.advance(sequence.token_ids[sequence.num_prompt_tokens :])
            if not state.is_idle:
                self._enter(sequence, state)

    @property
    def needs_bitmask(self) -> bool:
        """Whether a sequence may need a mask."""
        return bool(self.states)

    def filter_drafts(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        """The first of a sequence's drafts that its grammar and its reasoning allow."""
        state = self.states.get(sequence.seq_id)
        return drafts if state is None else drafts[: len(state.accept_tokens(drafts))]

    def start_bitmask(self, plan: StepPlan) -> Future[GrammarOutput] | None:
        """Start computing the bitmasks of a scheduled step; None if it needs none."""
        if not self.states:
            return None
        rows: list[BitmaskRow] = []
        for seq_id in plan.seq_ids:  # sequences of other steps in flight have their masks
            if (state := self.states.get(seq_id)) is None:
                continue
            sequence, drafts = self._sequences[seq_id], plan.drafts.get(seq_id, [])
            ends = sequence.num_computed_tokens == len(sequence.token_ids) + len(drafts)
            if sequence.status is not SequenceStatus.RUNNING or not ends:
                continue
            draft_states = state.accept_tokens(drafts)
            if _is_free(state) and all(map(_is_free, draft_states)):
                continue
            ignores = sequence.request.message.sampling.ignore_eos
            rows.append(BitmaskRow(seq_id, state, ignores))
            rows += [
                BitmaskRow(seq_id, draft_state, ignores, drafted=True)
                for draft_state in draft_states
            ]
        if not rows:
            return None
        if self._masks is None:
            self._masks = BitmaskBuilder(self._vocabularies.num_words, self._eos)
            weakref.finalize(self, self._masks.close)
        return self._masks.begin(plan.step, rows)

    def accept_tokens(
        self, sequence: Sequence, token_id: int, masks: GrammarOutput | None
    ) -> list[int]:
        """Advance the grammar of one of `states` by a token sampled under `masks`. Returns the
        tokens to append.

        If only EOS can follow, it is added at once, which saves a step. Not with log probabilities,
        since EOS has one, too.

        Raises:
            InvalidRequest: the grammar became too complex meanwhile.
        """
        grammar, params = self.states[sequence.seq_id], sequence.request.message.sampling
        try:
            if masks is not None and (reason := masks.errors.get(sequence.seq_id)):
                raise BadGrammar(reason)
            grammar.advance([token_id])
            if grammar.is_idle:
                self.leave(sequence)
                return [token_id]
        except BadGrammar as error:
            raise InvalidRequest(
                f"The output can't go on under its grammar: {error}.",
                param=PARAM,
                code="grammar_too_complex",
            ) from error
        eos = grammar.stop_token_ids or self._eos
        fits_another = sequence.num_output_tokens + 2 <= sequence.max_output_tokens
        stops = params.stop_token_ids or ()
        if (
            grammar.complete
            and fits_another
            and params.logprobs is None
            and token_id not in eos
            and token_id not in stops
        ):
            return [token_id, eos[0]]
        return [token_id]

    def _started_compiler(self) -> CompilePool:
        if self._compiler is None:
            self._compiler = CompilePool(
                self._vocabulary(), self.limits, vocabularies=self._vocabularies
            )
            # The compiler's threads don't refer to this object, so they stop when it is collected.
            weakref.finalize(self, self._compiler.close)
        return self._compiler

    def _vocabulary(self) -> Vocabulary:
        return self._vocabularies.models


def _is_free(state: GrammarState) -> bool:
    """Whether all tokens are allowed: reasoning without a grammar after it, within its budget."""
    return state.matcher is None and state.phase is not ReasoningPhase.CLOSING
