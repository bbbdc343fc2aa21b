"""`LLMEngine`: an engine in this process, whose caller runs each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.checkpoints.gguf.folder import find_gguf
from engine.checkpoints.load_format import MAX_BYTES, open_checkpoint, save_sharded_state
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineSleeping, InvalidRequest
from engine.contract.lora import AdapterRef, LoRARequest, spread_lora_requests
from engine.contract.messages import EngineRequest, MediaItem, TokenDelta
from engine.contract.pooling_params import PoolingParams, default_task
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.core.profiler import TorchProfiler
from engine.core.stats import StatsLogger
from engine.core.warmup import measure_draft_costs
from engine.model_loader.loader import resolve_folder
from engine.model_loader.save_quantized import save_quantized
from engine.model_loader.vllm_config import DecodingConfig, VllmConfig
from engine.multimodal.audio import pads_windows
from engine.multimodal.audio_prompts import AudioProcessor
from engine.multimodal.encoder_text import EncoderTextProcessor
from engine.multimodal.inputs import split_sampling
from engine.multimodal.placeholders import locate_media
from engine.multimodal.processor import MediaProcessor, PreparedMedia
from engine.multimodal.registry import find_registered_processor
from engine.multimodal.sound_processor import SoundProcessor
from engine.offline.engine_args import EngineArgs
from engine.offline.inputs import (
    AnyProcessor,
    ProcessorFactory,
    Prompt,
    TokenPrompt,
    resolve_prompt,
    tokenize_prompt,
)
from engine.offline.loaded_loras import LoadedLoRAs
from engine.offline.metrics import (
    Metric,
    RequestMetricsCollector,
    adapter_metrics,
    metrics_of,
    request_metrics,
)
from engine.offline.output_collector import RequestOutputCollector
from engine.offline.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput, record_end
from engine.offline.tokenizer import OfflineTokenizer
from engine.text.adapter_tokenizers import AdapterTokenizers
from engine.text.chat_template import read_template
from engine.text.stop_strings import bad_word_ids
from engine.text.tokenizer import Tokenizer


class TorchThreads:
    """Sets torch's number of threads while the engine runs, and restores the caller's afterwards.

    The compiled kernels have their own threads and leave torch one thread, as torch's idle threads
    would occupy their cores.
    """

    def __init__(self) -> None:
        self._engines: int | None = None
        self._depth = 0

    @contextmanager
    def engine_threads(self) -> Iterator[None]:
        """Return a context in which the engine runs. It is reentrant."""
        callers = torch.get_num_threads()
        if not self._depth and self._engines is not None:
            torch.set_num_threads(self._engines)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._engines = torch.get_num_threads()
                torch.set_num_threads(callers)


Result = RequestOutput | PoolingRequestOutput[PoolingOutput]


class LLMEngine:
    """An engine that accepts requests at any time, and runs a batch of them in each `step`.

    Attributes:
        config: the settings.
        core: schedules and runs requests.
        tokenizer: None with skip_tokenizer_init.

    Raises:
        ConfigError: a setting is out of range. ModelLoadError: the model can't be loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.threads = TorchThreads()
        with self.threads.engine_threads():
            self.core = EngineCore(config)
            measure_draft_costs(self.core)
        tokenizer = self.core.tokenizer
        if tokenizer is not None and config.chat_template:
            tokenizer = tokenizer.with_chat_template(read_template(config.chat_template))
        self.tokenizer = None if tokenizer is None else OfflineTokenizer.of(tokenizer)
        self._adapter_tokenizers = AdapterTokenizers()
        self.collectors: dict[str, RequestOutputCollector] = {}
        #: Results of steps outside of `run_step`, which the next `run_step` returns.
        self._owed: list[TokenDelta] = []
        self._pooling: dict[str, PoolingRequestOutput[PoolingOutput]] = {}
        self._profile = TorchProfiler()
        self._stats_log, self._figures = StatsLogger(enabled=False), RequestMetricsCollector()
        self._loaded = LoadedLoRAs(self.core.adapters, self._has_pending_output)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Create an engine with these settings. vLLM's other arguments are ignored."""
        return cls(engine_args.create_engine_config())

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        *,
        inputs: Prompt | None = None,
    ) -> str:
        """Queue a request. Returns its id.

        Args:
            prompt: a prompt as for `LLM.generate`; `inputs` is the argument's old name.
            params: by default the model's sampling parameters.
            arrival_time: seconds since the epoch, by default now.
            trace_headers: has no effect.

        Raises:
            InvalidRequest: it can't be served, or the id is in use.
        """
        if tokenization_kwargs:
            raise InvalidRequest(
                "tokenization_kwargs can't be used: give token ids instead.",
                param="tokenization_kwargs",
            )
        (lora_request,) = spread_lora_requests(lora_request, 1)
        adapter = None if lora_request is None else lora_request.ref()
        resolved, tokenizer = resolve_prompt(prompt, inputs), self.tokenizer_of(adapter)
        entry = tokenize_prompt(resolved, tokenizer, self.media_processor)
        entry = entry._replace(adapter=adapter, lora_request=lora_request)
        if params is None:
            params = SamplingParams(**self.core.facts.default_sampling)
        if isinstance(params, PoolingParams):
            self.submit_pooling(request_id, entry, params, priority)
        else:
            self.submit(request_id, entry, params, priority, arrival_time)
        return request_id

    def submit(
        self,
        request_id: str,
        entry: TokenPrompt,
        params: SamplingParams,
        priority: int,
        arrival_time: float | None = None,
    ) -> RequestOutputCollector:
        """Queue a tokenized prompt. `max_tokens` is limited to the model's context."""
        longest = self.core.facts.max_model_len
        if entry.encoder_token_ids is not None and params.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens can't be used: an encoder reads the prompt. Cut it before.",
                param="truncate_prompt_tokens",
            )
        entry = entry.last(params.prompt_limit(longest))
        remaining_tokens = longest - len(entry.token_ids)
        if params.max_tokens is not None and 0 < remaining_tokens < params.max_tokens:
            min_tokens = min(params.min_tokens, remaining_tokens)
            params = msgspec.structs.replace(
                params, max_tokens=remaining_tokens, min_tokens=min_tokens
            )
        tokenizer = self.tokenizer_of(entry.adapter)
        if params.bad_words:
            forbidden = bad_word_ids(tokenizer or self.get_tokenizer(), params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=forbidden)
        params = self._on_finished(params, tokenizer)
        ranked = params
        if params.num_sequences > params.n and params.logprobs is None:
            # Log probabilities are needed to rank the candidates.
            ranked = msgspec.structs.replace(params, logprobs=0)
        self._add_to_core(request_id, entry, priority, sampling=ranked)
        token_ids = entry.token_ids if entry.embeds is None else []
        collector = RequestOutputCollector(
            request_id,
            entry.text,
            token_ids,
            params,
            tokenizer,
            arrival_time,
            self._figures,
            entry.lora_request,
            (entry.encoder_text, entry.encoder_token_ids),
        )
        self.collectors[request_id] = collector
        return collector

    def _add_to_core(
        self, request_id: str, entry: TokenPrompt, priority: int, **params: Any
    ) -> None:
        self.core.add_request(
            EngineRequest(
                request_id=request_id,
                gateway_id="",
                prompt_token_ids=entry.token_ids,
                priority=priority,
                cache_namespace=entry.cache_salt,
                adapter=entry.adapter,
                media=self.locate_media(entry),
                **params,
            ),
            prompt_embeds=entry.embeds,
            media={item.digest: item.tensors for item in entry.media},
        )

    @property
    def media_processor(self) -> ProcessorFactory | None:
        """A function that creates the media processor on the first call, or the processor of an
        encoder's texts; None for a model without media.
        """
        facts = self.core.facts
        if facts.max_encoder_tokens:
            return EncoderTextProcessor(
                facts.decoder_start_ids, facts.max_encoder_tokens, facts.vocab_size
            )
        takes_media = facts.sees or facts.hears or facts.encoder_length
        return (lambda: self._processor) if takes_media else None

    @cached_property
    def _processor(self) -> AnyProcessor:
        facts = self.core.facts
        registered = find_registered_processor(lambda: self.vllm_config.model_config)
        if registered is not None:
            return registered
        if facts.hears:
            return AudioProcessor.from_folder(facts.tokenizer_folder)
        config = self.core.config
        if facts.encoder_length:
            pads = pads_windows(config.mm_processor_kwargs or {})
            return SoundProcessor(facts.num_mels, 2 * facts.encoder_length, pads)
        options, _ = split_sampling(config.mm_processor_kwargs)
        return MediaProcessor(facts.tokenizer_folder, config.pruning_rates, options)

    def locate_media(self, entry: TokenPrompt) -> list[MediaItem]:
        """Return a prompt's media with their positions."""
        facts, placed = self.core.facts, list[PreparedMedia]()
        if not (facts.encoder_length or facts.max_encoder_tokens):
            placed = [item for item in entry.media if isinstance(item, PreparedMedia)]
        if not placed:
            return [MediaItem(item.kind, item.digest, ()) for item in entry.media]
        return locate_media(entry.token_ids, placed)

    def _on_finished(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        """Return parameters with the EOS of an adapter's tokenizer as a stop token."""
        eos_id = None if tokenizer is None or params.ignore_eos else tokenizer.eos_token_id
        if tokenizer is self.tokenizer or eos_id in (None, *self.core.facts.eos_token_ids):
            return params
        stops = [*(params.stop_token_ids or ()), eos_id]
        return msgspec.structs.replace(params, stop_token_ids=stops)

    def submit_pooling(
        self, request_id: str, entry: TokenPrompt, params: PoolingParams, priority: int = 0
    ) -> None:
        """Queue a tokenized prompt, whose result is that of `run_step`."""
        pooling = self.core.facts.pooling
        if not params.task and pooling is not None:
            params = msgspec.structs.replace(params, task=default_task(self.core.facts.tasks))
        self._add_to_core(request_id, entry, priority, pooling=params)
        self._pooling[request_id] = PoolingRequestOutput(
            request_id, None, entry.token_ids, finished=False
        )

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort one or several requests; unknown and finished ones are ignored."""
        for one_id in [request_id] if isinstance(request_id, str) else list(request_id):
            self.core.abort(one_id)
            self.collectors.pop(one_id, None)
            self._pooling.pop(one_id, None)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of waiting and running requests."""
        return len(self.collectors) + len(self._pooling)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.collectors or self._pooling)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do. Requests of a sleeping model wait."""
        return bool(self._owed) or self.core.has_work

    def step(self) -> list[Result]:
        """Run a step. Returns the results of all requests with new output, by default with all
        output so far, see `SamplingParams.output_kind`. `finished` is set once a request has ended,
        and `error` if it failed.
        """
        results: list[Result] = []
        touched, pooled = self.run_step()
        for collector in touched:
            if (delta := collector.pop_delta()) is not None:
                results.append(delta)
        return results + list(pooled)

    def _has_pending_output(self) -> None:
        """Run a step, whose results the next `run_step` returns.

        Raises `EngineSleeping` while the model sleeps.
        """
        if self.core.is_sleeping:
            raise EngineSleeping("The model sleeps until it's woken up.")
        with self.threads.engine_threads():
            self._owed += self.core.step()

    def run_step(
        self,
    ) -> tuple[list[RequestOutputCollector], list[PoolingRequestOutput[PoolingOutput]]]:
        """Run a step. Returns the requests with new output, and removes those that have ended."""
        touched: dict[str, RequestOutputCollector] = {}
        pooled: list[PoolingRequestOutput[PoolingOutput]] = []
        with self.threads.engine_threads():
            deltas, self._owed = self._owed, []
            if self.core.has_work:
                deltas = deltas + self.core.step()
            for delta in deltas:
                if delta.request_id in self._pooling:
                    result = self._pooling.pop(delta.request_id)
                    if (values := record_end(result, delta)) is not None:
                        result.outputs = PoolingOutput(values)
                    pooled.append(result)
                    continue
                collector = self.collectors.get(delta.request_id) or touched.get(delta.request_id)
                if collector is None:  # aborted meanwhile
                    continue
                touched[delta.request_id] = collector
                if collector.push(delta):
                    self.core.abort(delta.request_id, delta.index, "stop")
                if collector.error is not None:
                    self.core.abort(delta.request_id)
                if collector.finished:
                    self.collectors.pop(delta.request_id, None)
        return list(touched.values()), pooled

    def tokenizer_of(self, adapter: AdapterRef | None) -> Tokenizer | None:
        """Return an adapter's tokenizer, by default the model's; None with skip_tokenizer_init."""
        base = self.tokenizer
        return None if base is None else self._adapter_tokenizers.get(adapter, base)

    def get_tokenizer(self) -> OfflineTokenizer:
        """Return the tokenizer. Raises `InvalidRequest` with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise InvalidRequest("This LLM was made with skip_tokenizer_init.", param="tokenizer")
        return self.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replace the tokenizer by a result of `get_tokenizer`, that of a folder, or a fast
        tokenizer of the transformers library.

        Raises:
            InvalidRequest: the argument has another type.
            ModelLoadError: the folder has no tokenizer.
        """
        self.tokenizer = OfflineTokenizer.convert(tokenizer)

    def get_model_config(self) -> EngineConfig:
        """Return the settings, with the resolved context length."""
        return replace(self.config, max_model_len=self.core.facts.max_model_len)

    def get_decoding_config(self) -> DecodingConfig:
        """Return the settings of structured outputs, which use llguidance, vLLM's "guidance"."""
        return DecodingConfig(reasoning_backend=self.config.reasoning_parser or "")

    @property
    def model_config(self) -> EngineConfig:
        return self.get_model_config()

    @property
    def vllm_config(self) -> VllmConfig:
        """The settings and the model's properties, with vLLM's names."""
        return self.core.executor.vllm_config

    def do_log_stats(self) -> None:
        """Log the current load, and the throughput since the last call."""
        self._stats_log.log(self.core.snapshot)

    def get_metrics(self) -> list[Metric]:
        """Return metrics by vLLM's names."""
        name, max_model_len = self.config.name, self.core.facts.max_model_len
        states, max_adapters = self.core.adapters.states(), self.config.max_loras
        return [
            *metrics_of(self.core.snapshot(), name, max_model_len),
            *request_metrics(self._figures, name, max_model_len),
            *adapter_metrics(states, max_adapters, name),
        ]

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the supported tasks: "generate", or those of a pooling model."""
        return tuple(self.core.facts.tasks)

    def is_sleeping(self) -> bool:
        """Return whether weights or KV cache are asleep. Meanwhile requests can't run."""
        return self.core.is_sleeping

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache. Returns False, without clearing it, while any request has blocks.

        With `reset_running_requests` running requests free their blocks and recompute them. Blocks
        outside of the KV cache are dropped as well, with or without `reset_connector`.
        """
        if reset_running_requests:
            with self.threads.engine_threads():
                self._owed += self.core.preempt_all()
        return self.core.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Release memory until `wake_up`; see `LLM.sleep`."""
        with self.threads.engine_threads():
            self._owed += self.core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocate memory; see `LLM.wake_up`."""
        with self.threads.engine_threads():
            self.core.wake_up(tags)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter to the device before its first request. Returns False if it is already
        loaded.

        Raises `InvalidRequest` if it can't be loaded for this model.
        """
        return self._loaded.add(lora_request)

    def pin_lora(self, lora_id: int) -> bool:
        """Pin an adapter that was loaded by `add_lora`, so that it is never evicted.

        Raises `InvalidRequest` for an unknown number.
        """
        return self._loaded.pin(lora_id)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter, even a pinned one, once it is unused; False if it isn't loaded."""
        return self._loaded.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of added adapters on the device."""
        return self._loaded.numbers()

    def start_profile(self, folder: str | None = None) -> None:
        """Profile computations until `stop_profile`.

        Raises `InvalidRequest` while another profile runs.
        """
        self._profile.start(folder)

    def stop_profile(self) -> str:
        """Stop the profile. Returns its file, for Perfetto or chrome://tracing.

        Raises `InvalidRequest` if no profile runs.
        """
        return self._profile.stop()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, or a function with each worker. Returns the results by
        rank.

        `timeout` has no effect. Raises `InvalidRequest` for a method that workers don't have.
        """
        return self.core.executor.collective_rpc(method, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each worker's model. Returns the results by rank."""
        with self.threads.engine_threads():
            return self.core.executor.collective_rpc(lambda worker: func(worker.loaded.model))

    @property
    def model_executor(self) -> LLMEngine:
        """This engine, as vLLM's executor has `save_sharded_state`."""
        return self

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | str | None = MAX_BYTES
    ) -> list[Path]:
        """Save the checkpoint's weights to a folder for load_format="sharded_state". Returns the
        files.

        Weights are saved as they are in the checkpoint, and `quantization` is applied whenever the
        files are loaded.

        Raises:
            InvalidRequest: the folder, pattern or size is invalid, or the checkpoint is a GGUF
            file. ModelLoadError: the checkpoint can't be read.
        """
        folder = resolve_folder(self.config)
        if find_gguf(Path(self.config.model)) is not None:
            raise InvalidRequest("A GGUF file is saved as it is: copy it.", param="path")
        return save_sharded_state(
            open_checkpoint(folder, self.config).tensors(), path, pattern, max_size
        )

    def save_quantized(self, path: str | Path) -> list[Path]:
        """Save the model to a new folder as compressed-tensors, with linear layers in the 8 or 4
        bits of `quantization`, for Quire and other engines. Returns the weight files.

        The 4-bit weights are those of this engine. The 8-bit weights have a scale per row, whereas
        this engine uses one per 128 elements. Embedding tables are saved as in the checkpoint.

        Raises:
            InvalidRequest: `quantization` isn't int8 or int4, the checkpoint is a GGUF file or
                already quantized, the folder exists or can't be written, or the model runs in
                another library.
        """
        [model] = self.core.executor.collective_rpc(lambda worker: worker.loaded.model)
        return save_quantized(self.config, model, path)

    def shutdown(self) -> None:
        """Release all memory and threads. The engine is unusable afterwards."""
        self.core.shutdown()
