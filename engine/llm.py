"""`LLM`: the engine offline, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from engine.assembler import OutputAssembler, logprob_entry
from engine.beams.offline import BeamSearchMethods
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineFault, InvalidRequest
from engine.outputs import CompletionOutput, Logprob, RequestOutput
from engine.pooling.offline import PoolingMethods
from engine.prompts import Prompt, TokenPrompt, as_list, tokenise
from engine.protocol import EngineRequest, TokenDelta, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.bad_words import bad_word_ids
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]


class LLM(PoolingMethods, BeamSearchMethods):
    """Generates from a model in this process; or embeds, classifies and scores with one.

    Args:
        model: folder of the model (or a hub id where a hub is in reach).
        **settings: everything of `EngineConfig`: `dtype`, `block_size`, `max_num_seqs`,
            `max_num_batched_tokens`, `num_gpu_blocks_override`, `enable_prefix_caching`, `seed`.

    Raises:
        ConfigError: a setting is out of its range.
        ModelLoadError: the model can't be loaded.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig.from_mapping({"model": model, **settings})
        self.core = EngineCore(self.config)
        self._tokenizer = self.core.loaded.tokenizer
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `InvalidRequest` with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequest("This LLM was made with skip_tokenizer_init.", param="tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests get that bring no `SamplingParams`: the model's own defaults."""
        return SamplingParams(**self.core.loaded.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched; results come in the order of the prompts.

        Args:
            prompts: a text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or, with
                enable_prompt_embeds, {"prompt_embeds": float tensor [num_tokens, hidden]} as the
                model's embedding table gives them; or a list of such.
            sampling_params: for all, or one a prompt; default: the model's own.
            prompt_token_ids: instead of `prompts`.
            use_tqdm: show a progress bar.
            priority: one a prompt, with scheduling_policy="priority".

        Raises:
            InvalidRequest: a prompt or parameter can't be served; nothing has run then.
            EngineFault: the engine failed on one of them.
        """
        if prompts is None:
            if prompt_token_ids is None:
                raise InvalidRequest(
                    "Either prompts or prompt_token_ids is needed.", param="prompt"
                )
            prompts = prompt_token_ids
        entries = [tokenise(prompt, self._tokenizer) for prompt in as_list(prompts)]
        params = self._params_for(sampling_params, len(entries))
        if priority is not None and len(priority) != len(entries):
            raise InvalidRequest("priority needs one entry a prompt.", param="priority")
        return self._run(entries, params, list(priority or [0] * len(entries)), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation, or of several."""
        several = messages and not isinstance(messages[0], dict)
        conversations: Any = messages if several else [messages]
        prompts: list[Prompt] = [
            render_chat(
                self.get_tokenizer(),
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    # -- memory -------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give the KV cache's memory back and, on a GPU, move the weights to the host's; at level 2
        give the weights' back too. Needs `enable_sleep_mode`.

        Raises `InvalidRequest` for another level, or without that setting.
        """
        self.core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again: of "weights" and "kv_cache" those in `tags`, or all.

        Raises `InvalidRequest` for another tag, `ModelLoadError` when the weights are gone.
        """
        self.core.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether something sleeps still; until then nothing can be generated."""
        return self.core.is_sleeping

    # -- the batch ----------------------------------------------------------------------------

    def _params_for(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """One `SamplingParams` a prompt."""
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequest(
                f"{count} prompts need as many sampling_params, got {len(given)}.",
                param="sampling_params",
            )
        return list(given)

    def _run(
        self,
        entries: list[TokenPrompt],
        params: list[SamplingParams],
        priorities: list[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run a batch to its end. Whatever goes wrong, nothing of it stays in the engine."""
        collectors: dict[str, _Collector] = {}
        try:
            for entry, param, priority in zip(entries, params, priorities, strict=True):
                collector = self._submit(entry, param, priority)
                collectors[collector.request_id] = collector
            with tqdm(total=len(entries), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self.core.has_work:
                    for delta in self.core.step():
                        bar.update(self._take(collectors[delta.request_id], delta))
        except BaseException:
            for request_id in collectors:
                self.core.abort(request_id)
            raise
        return [collector.result() for collector in collectors.values()]

    def _submit(self, entry: TokenPrompt, params: SamplingParams, priority: int) -> _Collector:
        entry = entry.last(params.prompt_limit(self.core.loaded.max_model_len))
        if params.bad_words:
            forbidden = bad_word_ids(self.get_tokenizer(), params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=forbidden)
        ranked = params
        if params.num_sequences > params.n and params.logprobs is None:
            # Ranking the candidates needs their log probabilities.
            ranked = msgspec.structs.replace(params, logprobs=0)
        request_id = str(next(self._ids))
        self.core.add_request(
            EngineRequest(
                request_id=request_id,
                gateway_id="",
                prompt_token_ids=entry.token_ids,
                sampling=ranked,
                priority=priority,
            ),
            prompt_embeds=entry.embeds,
        )
        known = entry.token_ids if entry.embeds is None else []
        return _Collector(request_id, entry.text, known, params, self._tokenizer)

    def _take(self, collector: _Collector, delta: TokenDelta) -> bool:
        """Hand a delta to its collector; True when that finished the request."""
        if delta.error is not None:
            kind = InvalidRequest if delta.error.status == 400 else EngineFault
            raise kind(delta.error.message, param=delta.error.param, code=delta.error.code)
        if collector.push(delta):
            self.core.abort(delta.request_id, delta.index, "stop")
        return collector.just_finished()


class _Collector:
    """Gathers one request's outputs."""

    def __init__(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self._text, self._token_ids = text, token_ids
        self._tokenizer = tokenizer
        self._assemblers = [
            OutputAssembler(index, token_ids, params, tokenizer)
            for index in range(params.num_sequences)
        ]
        self._params = params
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._cached = 0
        self._told = False

    def push(self, delta: TokenDelta) -> bool:
        """True when a stop string ended the output and the engine should stop it."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [self._entry(scores) for scores in delta.prompt_logprobs]
        if delta.num_prompt_tokens and delta.index == 0:
            self._cached = delta.num_cached_tokens
        return self._assemblers[delta.index].push(delta)

    def _entry(self, scores: TokenLogprobs | None) -> dict[int, Logprob] | None:
        return None if scores is None else logprob_entry(scores, self._tokenizer)

    def just_finished(self) -> bool:
        """True once, when all outputs have ended."""
        if self._told or not all(a.output.finished for a in self._assemblers):
            return False
        self._told = True
        return True

    def result(self) -> RequestOutput:
        """The request's result; with best_of, the n likeliest outputs."""
        outputs = [assembler.output for assembler in self._assemblers]
        if len(outputs) > self._params.n:
            outputs = self._best(outputs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._text,
            prompt_token_ids=self._token_ids,
            outputs=outputs,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached,
        )

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n best of best_of, best first."""
        ranked = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))
        best = ranked[: self._params.n]
        for index, output in enumerate(best):
            output.index = index
            if self._params.logprobs is None:
                output.logprobs = None
        return best
