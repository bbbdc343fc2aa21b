"""`PoolingMethods`: the methods of `LLM` for pooling models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from engine.contract.errors import EngineFault, EngineSleeping, InvalidRequest
from engine.contract.lora import AdapterRef, to_adapter_refs
from engine.contract.messages import PoolingInfo
from engine.contract.plugins import PooledData, PooledPrompt, io_processor
from engine.contract.pooling_params import (
    TOKEN_TASKS,
    PoolingParams,
    default_task,
    score_pairs,
    similarity,
)
from engine.contract.validation import check_task
from engine.offline.base import LLMBase, UseTqdm, check_failures, per_prompt, progress
from engine.offline.inputs import Prompt, TokenPrompt, as_list, tokenize_prompt
from engine.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

Input = TypeVar("Input")
Output = TypeVar("Output")
Raw = PoolingRequestOutput[torch.Tensor]
#: A prompt and its parameters.
Entry = tuple[TokenPrompt, PoolingParams]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(LLMBase):
    """Methods of `LLM` for pooling models."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each prompt. Prompts are those of `generate`.

        If only some requests fail, their results have an `error` and no `outputs`.

        Raises:
            InvalidRequest: the model doesn't embed, or a prompt or parameter is invalid.
            InvalidRequest, EngineFault: all requests failed; this is the first error.
        """
        results = self._pool(prompts, pooling_params, "embed", use_tqdm, lora_request)
        return [_converted(raw, lambda data: EmbeddingOutput(data[0].tolist())) for raw in results]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
    ) -> list[ClassificationRequestOutput]:
        """Return each prompt's probabilities of the labels. Raises the errors of `embed`."""
        results = self._pool(prompts, pooling_params, "classify", use_tqdm, lora_request)
        info = self._pooling_info
        labels = info.labels if info is not None else []
        return [
            _converted(raw, lambda data: ClassificationOutput(data[0].tolist(), labels))
            for raw in results
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        pooling_params: Params = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        *,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return results as tensors, by default of the model's own task.

        The tasks "token_embed" and "token_classify" return a row per token. `{"data": ...}` is
        passed to the model's IO processor, whose answer is the `outputs` of the only result.
        `prompt_token_ids` is an alternative to `prompts`. Raises the errors of `embed`.
        """
        data: Any = prompts
        if isinstance(data, dict) and "data" in data:
            return [self._process(data["data"], pooling_params, use_tqdm, lora_request)]
        prompts = prompt_token_ids if prompts is None else prompts
        if prompts is None:
            raise InvalidRequest("Either prompts or prompt_token_ids is needed.", param="prompt")
        task = pooling_task or default_task(self.core.facts.tasks)
        by_token = task in TOKEN_TASKS
        results = self._pool(prompts, pooling_params, task, use_tqdm, lora_request)
        return [
            _converted(raw, lambda row: PoolingOutput(row if by_token else row[0]))
            for raw in results
        ]

    def _process(
        self, data: Any, requested_params: Params, use_tqdm: UseTqdm, lora_request: Any
    ) -> PoolingRequestOutput[Any]:
        """Return the answer of the model's IO processor to `data`, as `outputs`."""
        facts = self.core.facts
        if not facts.io_processor:
            raise InvalidRequest("This model has no IO processor.", param="data")
        if not (requested_params is None or isinstance(requested_params, PoolingParams)):
            raise InvalidRequest("data takes one PoolingParams.", param="pooling_params")
        processor = io_processor(facts.io_processor, self.core.config.name)
        try:
            processed = processor.pre_process(processor.parse_data(data))
        except ValueError as error:
            raise InvalidRequest(f"data: {error}", param="data") from error
        prompts: Any = [processed] if isinstance(processed, (str, dict)) else list(processed)
        task = default_task(facts.tasks)
        params = processor.merge_pooling_params(requested_params)
        raw = self._pool(prompts, params, task, use_tqdm, lora_request)
        by_token, pooled = task in TOKEN_TASKS, list[PooledPrompt]()
        for raw_result in raw:
            if raw_result.outputs is None:  # the answer needs all results
                raise raw_result.error or EngineFault("The engine gave no result.")
            values = raw_result.outputs if by_token else raw_result.outputs[0]
            pooled.append(PooledPrompt(raw_result.prompt_token_ids, PooledData(values.numpy())))
        answer = processor.post_process(pooled)
        return _converted(raw[0], lambda _: answer)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the scores of a reward model, float32 [num_tokens, size] if it scores each token,
        else [size] for the prompt. Raises the errors of `embed`.
        """
        tasks = self.core.facts.tasks
        task = next(
            (task_name for task_name in ("token_classify", "classify") if task_name in tasks), ""
        )
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=task or "classify",
        )

    def score(
        self,
        text_1: str | list[str],
        text_2: str | list[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
    ) -> list[ScoringRequestOutput]:
        """Score how well texts match: one text with several, or pairs.

        Uses a cross-encoder if the model is one, otherwise the similarity of embeddings. Raises the
        errors of `embed`.
        """
        tasks = self.core.facts.tasks
        check_task(self.core.config.name, tasks, "score")
        first = [text_1] if isinstance(text_1, str) else list(text_1)
        second = [text_2] if isinstance(text_2, str) else list(text_2)
        pairs = score_pairs(len(first), len(second))
        params = pooling_params or PoolingParams()
        if "embed" in tasks:
            return self._score_embeddings(first, second, pairs, params, use_tqdm, lora_request)
        refs = to_adapter_refs(lora_request, len(pairs))
        entries = [
            self._pair(first[a], second[b], params, ref)
            for (a, b), ref in zip(pairs, refs, strict=True)
        ]
        results = self._run_pooling(entries, use_tqdm, lora_request)
        return [_converted(raw, lambda data: ScoringOutput(float(data[0, 0]))) for raw in results]

    def _pair(
        self, first: str, second: str, params: PoolingParams, adapter: AdapterRef | None
    ) -> Entry:
        limit = params.prompt_limit(self.core.facts.max_model_len)
        tokenizer = self.llm_engine.tokenizer_of(adapter) or self.llm_engine.get_tokenizer()
        parts = tokenizer.encode_parts(first, second, limit=limit)
        info = self._pooling_info
        typed = parts.second_segment if info is not None and info.token_types else 0
        params = msgspec.structs.replace(params, task="score", second_segment=typed)
        return TokenPrompt(None, parts.token_ids), params

    def _entry(
        self, prompt: Prompt, params: PoolingParams, task: str, adapter: AdapterRef | None
    ) -> Entry:
        """Return a tokenized prompt, truncated if requested, and its parameters.

        Raises `InvalidRequest` for parameters of another task, and if a prompt with media would be
        truncated.
        """
        if params.task not in ("", task):
            raise InvalidRequest(
                f"PoolingParams of the task '{params.task}' can't be used to '{task}'.",
                param="task",
            )
        params = msgspec.structs.replace(params, task=task)
        limit = params.prompt_limit(self.core.facts.max_model_len)
        tokenizer = self.llm_engine.tokenizer_of(adapter)
        tokens = tokenize_prompt(prompt, tokenizer, self.llm_engine.media_processor)
        has_token_ids = isinstance(prompt, dict) and "prompt_token_ids" in prompt
        text = None if has_token_ids else tokens.text
        token_ids = tokens.token_ids
        if tokens.media:
            if limit is not None and limit < len(token_ids):
                raise InvalidRequest(
                    "A prompt with media can't be cut.", param="truncate_prompt_tokens"
                )
            return tokens, params
        if text is not None and tokenizer is not None:
            info = self._pooling_info
            prefix = info.prompt if info is not None else ""
            token_ids = tokenizer.encode_parts(prefix + text, limit=limit).token_ids
        elif limit is not None:
            token_ids = token_ids[:limit]
        return tokens._replace(token_ids=token_ids), params

    @property
    def _pooling_info(self) -> PoolingInfo | None:
        """The properties of a pooling model; None for a generative one."""
        pooling = self.core.facts.pooling
        return None if pooling is None else pooling.info

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        requested_params: Params,
        task: str,
        use_tqdm: UseTqdm,
        lora_request: Any,
    ) -> list[Raw]:
        check_task(self.core.config.name, self.core.facts.tasks, task)
        listed = as_list(prompts)
        requested = PoolingParams() if requested_params is None else requested_params
        params = per_prompt("pooling_params", requested, PoolingParams, len(listed))
        refs = to_adapter_refs(lora_request, len(listed))
        entries = [
            self._entry(prompt, param, task, ref)
            for prompt, param, ref in zip(listed, params, refs, strict=True)
        ]
        return self._run_pooling(entries, use_tqdm, lora_request)

    def _score_embeddings(
        self,
        first: list[str],
        second: list[str],
        pairs: list[tuple[int, int]],
        params: PoolingParams,
        use_tqdm: UseTqdm,
        lora_request: Any,
    ) -> list[ScoringRequestOutput]:
        results = self._pool([*first, *second], params, "embed", use_tqdm, lora_request)
        info = self._pooling_info
        kind = info.similarity if info is not None else "cosine"
        scores = [_score(kind, results[a], results[len(first) + b]) for a, b in pairs]
        check_failures(scores)
        return scores

    def _run_pooling(self, entries: list[Entry], use_tqdm: UseTqdm, lora_request: Any) -> list[Raw]:
        """Run requests until they finish. On an exception all of them are aborted.

        Their outputs are float32 [1, size] or [num_tokens, size].
        """
        engine, results = self.llm_engine, dict[str, Raw]()
        by_token = any(params.by_token for _, params in entries)
        adapters = to_adapter_refs(lora_request, len(entries))
        waiting: set[str] = set()
        ids = [str(next(self._ids)) for _ in entries]
        try:
            for request_id, (prompt, params), adapter in zip(ids, entries, adapters, strict=True):
                engine.submit_pooling(request_id, prompt._replace(adapter=adapter), params)
                waiting.add(request_id)
            with self._threads.engine_threads(), progress(use_tqdm, len(entries)) as bar:
                while waiting:
                    if not engine.has_work:
                        raise EngineSleeping("The model sleeps: wake it up first.")
                    for result in engine.run_step()[1]:
                        results[result.request_id] = _by_row(result, by_token)
                        waiting.discard(result.request_id)
                        bar.update()
        except BaseException:
            engine.abort_request(waiting)
            raise
        check_failures(list(results.values()))
        return [results[request_id] for request_id in ids]


def _by_row(result: PoolingRequestOutput[PoolingOutput], by_token: bool) -> Raw:
    """Return the result with outputs [1, size] or [num_tokens, size]."""
    rows = len(result.prompt_token_ids) if by_token else 1
    return _converted(result, lambda output: output.data.view(rows, -1))


def _converted(
    raw: PoolingRequestOutput[Input], make: Callable[[Input], Output]
) -> PoolingRequestOutput[Output]:
    outputs = None if raw.outputs is None else make(raw.outputs)
    return PoolingRequestOutput(
        raw.request_id, outputs, raw.prompt_token_ids, raw.num_cached_tokens, error=raw.error
    )


def _score(kind: str, query: Raw, text: Raw) -> ScoringRequestOutput:
    """Return the similarity of two embeddings, or the error if one of them is missing."""
    score = None
    if query.outputs is not None and text.outputs is not None:
        score = ScoringOutput(similarity(kind, query.outputs[0].numpy(), text.outputs[0].numpy()))
    return PoolingRequestOutput(
        request_id=text.request_id,
        outputs=score,
        prompt_token_ids=query.prompt_token_ids + text.prompt_token_ids,
        error=query.error or text.error,
    )
