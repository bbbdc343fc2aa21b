"""`LLM`: offline inference in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineSleeping, InvalidRequest
from engine.contract.lora import spread_lora_requests, to_adapter_refs
from engine.contract.replica_state import LayerReport
from engine.contract.sampling_params import SamplingParams
from engine.multimodal.inputs import split_sampling
from engine.offline.base import UseTqdm, check_failures, per_prompt, progress
from engine.offline.beam_search import BeamSearchOutput, BeamSearchParams, beams_of
from engine.offline.chat_media import MediaAccess, extract_media
from engine.offline.engine_args import EngineArgs, offline_config
from engine.offline.inputs import Prompt, TokenPrompt, as_list, tokenize_prompt
from engine.offline.llm_engine import LLMEngine
from engine.offline.metrics import Metric
from engine.offline.output_collector import RequestOutputCollector
from engine.offline.outputs import RequestOutput
from engine.offline.pooling import PoolingMethods
from engine.offline.tokenizer import OfflineTokenizer
from engine.text.chat_template import render_chat

Messages = list[dict[str, Any]]
#: Positional arguments of `LLM` after `model`, as in vLLM.
_POSITIONAL = (
    *("tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code"),
    *("tensor_parallel_size", "dtype", "quantization", "revision", "tokenizer_revision", "seed"),
    *("gpu_memory_utilization", "swap_space", "enforce_eager", "max_context_len_to_capture"),
    *("max_seq_len_to_capture", "disable_custom_all_reduce"),
)
#: Settings of `LLM.chat`, which an engine doesn't have.
_MEDIA_ACCESS = tuple(field.name for field in fields(MediaAccess))


class LLM(PoolingMethods):
    """A model in this process, to generate, embed, classify or score.

    Args:
        model: folder of the model, or a hub id if a hub is reachable.
        *positional: positional settings as in vLLM: tokenizer, tokenizer_mode, ...
        **settings: all settings of `EngineConfig`: `dtype`, `block_size`, `max_num_seqs`,
            `max_num_batched_tokens`, `num_gpu_blocks_override`, `enable_prefix_caching`, `seed`.
            vLLM's names are also accepted. Those of `MediaAccess` are for `chat`.

    Attributes:
        llm_engine: the engine, for callers that run single steps.

    Raises:
        ConfigError: a setting is out of range.
        ModelLoadError: the model can't be loaded.
    """

    def __init__(self, model: str, *positional: Any, **settings: Any) -> None:
        if len(positional) > len(_POSITIONAL):
            raise TypeError(f"LLM takes at most {len(_POSITIONAL) + 1} arguments by place.")
        for name, value in zip(_POSITIONAL, positional, strict=False):
            if name in settings:
                raise TypeError(f"LLM got two values for {name}.")
            settings[name] = value
        values = {name: value for name, value in settings.items() if value is not None}
        access = {name: values.pop(name) for name in _MEDIA_ACCESS if name in values}
        self._media_access = MediaAccess(**access)
        self._use(LLMEngine(offline_config({**values, "model": model})))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Create an LLM with these settings."""
        settings = dict(vars(engine_args))
        return cls(settings.pop("model"), **settings)

    def _use(self, engine: LLMEngine) -> None:
        super()._use(engine)
        self._enqueued: list[RequestOutputCollector] = []

    def get_tokenizer(self) -> OfflineTokenizer:
        """Return the tokenizer. Raises `InvalidRequest` with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replace the tokenizer; see `LLMEngine.set_tokenizer`."""
        self.llm_engine.set_tokenizer(tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's default `SamplingParams`."""
        return SamplingParams(**self.core.facts.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        *,
        priority: Sequence[int] | int | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for all prompts in batches. Results are in the order of the prompts.

        An output that reaches the model's context length ends with the finish reason "length". A
        prompt that leaves no space for an output is refused.

        Args:
            prompts: a text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or, with
                enable_prompt_embeds, {"prompt_embeds": float tensor [num_tokens, hidden]} in place
                of the outputs of the embedding table; or a list of these.
            sampling_params: those of all prompts or one per prompt; by default the model's.
            prompt_token_ids: an alternative to `prompts`.
            use_tqdm: whether to show a progress bar, or a function that creates one, like tqdm.
            lora_request: the adapter (`LoRARequest`) of all prompts or one per prompt, or None.
            priority: that of all prompts or one per prompt, with scheduling_policy="priority".

        If only some requests fail, their results have an `error` and the `finish_reason` "error".

        Raises:
            InvalidRequest: a prompt or parameter is invalid; no request was run.
            InvalidRequest, EngineFault: all requests failed; this is the first error.
        """
        entries = self._entries(prompts, prompt_token_ids, lora_request)
        return self._finish(self._submit_all(entries, sampling_params, priority), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` most likely continuations of each prompt.

        Prompts and errors are those of `generate`.
        """
        results = self.generate(
            prompts, params.sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request
        )
        refs = to_adapter_refs(lora_request, len(results))
        searches = [
            beams_of(result, params, self.llm_engine.tokenizer_of(ref))
            for result, ref in zip(results, refs, strict=True)
        ]
        decoded = [
            search for search, result in zip(searches, results, strict=True) if result.error is None
        ]
        check_failures(decoded)
        return searches

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | int | None = None,
    ) -> list[str]:
        """Queue prompts without running them. Returns the requests' ids.

        Arguments are those of `generate`. Raises `InvalidRequest` for an invalid prompt or
        parameter; no request is queued then.
        """
        entries = self._entries(prompts, None, lora_request)
        collectors = self._submit_all(entries, sampling_params, priority)
        self._enqueued += collectors
        return [collector.request_id for collector in collectors]

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Run all requests that were enqueued, and return their results in order.

        `output_type` is the class, or a tuple of classes, that results must have. Raises the errors
        of `generate`, and `TypeError` for a result of another class.
        """
        waiting, self._enqueued = self._enqueued, []
        results = self._finish(waiting, use_tqdm)
        if output_type is not None and any(
            not isinstance(result, output_type) for result in results
        ):
            raise TypeError(f"A result is no {output_type}.")
        return results

    def _entries(self, prompts: Any, prompt_token_ids: Any, lora_request: Any) -> list[TokenPrompt]:
        prompts = prompt_token_ids if prompts is None else prompts
        if prompts is None:
            raise InvalidRequest("Either prompts or prompt_token_ids is needed.", param="prompt")
        listed = as_list(prompts)
        requests = spread_lora_requests(lora_request, len(listed))
        refs, tokenizer_of = to_adapter_refs(requests, len(listed)), self.llm_engine.tokenizer_of
        processor = self.llm_engine.media_processor
        return [
            tokenize_prompt(prompt, tokenizer_of(ref), processor)._replace(
                adapter=ref, lora_request=request
            )
            for prompt, ref, request in zip(listed, refs, requests, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        priority: Sequence[int] | int | None = None,
    ) -> list[RequestOutput]:
        """Generate the next turn of one or several conversations. Raises the errors of `generate`.

        Messages may contain media, for example parts `image_url`, or PIL images as `image_pil`.
        """
        prompts = self._rendered(
            messages,
            lora_request,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            **(chat_template_kwargs or {}),
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
        )

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | int | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue the next turns, as `chat`, without running them; see `enqueue`."""
        prompts = self._rendered(
            messages,
            lora_request,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            **(chat_template_kwargs or {}),
        )
        return self.enqueue(prompts, sampling_params, use_tqdm, lora_request, priority)

    def _rendered(
        self, messages: Messages | Sequence[Messages], lora_request: Any, **options: Any
    ) -> list[Prompt]:
        several = messages and not isinstance(messages[0], dict)
        conversations: Any = messages if several else [messages]
        base, prompts = self.get_tokenizer(), list[Prompt]()
        refs = to_adapter_refs(lora_request, len(conversations))
        config = self.core.config
        _, sampling = split_sampling(config.mm_processor_kwargs)
        sampling = sampling or (config.media_io_kwargs or {}).get("video", {})
        for conversation, ref in zip(conversations, refs, strict=True):
            tokenizer = self.llm_engine.tokenizer_of(ref) or base
            chat, media = extract_media(conversation, sampling, self._media_access)
            ids = render_chat(tokenizer, chat, **options)
            text = tokenizer.decode(ids, skip_special_tokens=False)
            prompt: dict[str, Any] = {"prompt_token_ids": ids, "prompt": text}
            prompts.append(prompt | {"multi_modal_data": media} if media else prompt)
        return prompts

    def save_quantized(self, path: str | Path) -> list[Path]:
        """Save the model as compressed-tensors; see `LLMEngine.save_quantized`."""
        return self.llm_engine.save_quantized(path)

    def load_report(self) -> list[LayerReport]:
        """Return how each layer's weights were loaded; empty for a model in another library."""
        return list(self.core.facts.load_report)

    def sleep(self, level: int = 1) -> None:
        """Release the KV cache's memory and, on a GPU, move the weights to host memory. Level 2
        also releases the weights.

        Raises `InvalidRequest` for another level, or without `enable_sleep_mode`, and `ConfigError`
        for a model that can't sleep.
        """
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocate the memory of `tags`, "weights" and "kv_cache", by default of both.

        Raises `InvalidRequest` for another tag, `ModelLoadError` if the weights can't be read.
        """
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether weights or KV cache are asleep. Meanwhile requests can't run."""
        return self.llm_engine.is_sleeping()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache; see `LLMEngine.reset_prefix_cache`."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Drop cached encoder outputs that no request needs."""
        self.llm_engine.core.reset_encoder_cache()

    @property
    def model_config(self) -> EngineConfig:
        """The settings, with the resolved context length."""
        return self.llm_engine.get_model_config()

    def get_metrics(self) -> list[Metric]:
        """Return metrics by vLLM's names."""
        return self.llm_engine.get_metrics()

    def start_profile(self, folder: str | None = None) -> None:
        """Start a profile; see `LLMEngine.start_profile`."""
        self.llm_engine.start_profile(folder)

    def stop_profile(self) -> str:
        """Stop the profile and return its file."""
        return self.llm_engine.stop_profile()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker; see `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each worker's model. Returns the results by rank."""
        return self.llm_engine.apply_model(func)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks that share the model."""
        return self.core.config.world_size

    def _submit_all(
        self,
        entries: list[TokenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | int | None,
    ) -> list[RequestOutputCollector]:
        """Queue all requests, or none if one is invalid."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        count = len(entries)
        params = per_prompt("sampling_params", sampling_params, SamplingParams, count)
        priorities = per_prompt("priority", 0 if priority is None else priority, int, count)
        collectors: list[RequestOutputCollector] = []
        try:
            for entry, param, priority in zip(entries, params, priorities, strict=True):
                request_id = str(next(self._ids))
                collectors.append(self.llm_engine.submit(request_id, entry, param, priority))
        except BaseException:
            self.llm_engine.abort_request(collector.request_id for collector in collectors)
            raise
        return collectors

    def _finish(
        self, collectors: list[RequestOutputCollector], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Run requests until they finish. On an exception all of them are aborted."""
        waiting = {
            collector.request_id: collector for collector in collectors if not collector.finished
        }
        try:
            with self._threads.engine_threads(), progress(use_tqdm, len(collectors)) as bar:
                bar.update(len(collectors) - len(waiting))
                while waiting:
                    if not self.llm_engine.has_work:
                        raise EngineSleeping("The model sleeps: wake it up first.")
                    for collector in self.llm_engine.run_step()[0]:
                        if collector.finished and collector.request_id in waiting:
                            del waiting[collector.request_id]
                            bar.update()
        except BaseException:
            self.llm_engine.abort_request(waiting)
            raise
        results = [collector.result() for collector in collectors]
        check_failures(results)
        return results
