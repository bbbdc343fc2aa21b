"""`AsyncLLM`: an engine in a thread of this process, with an asyncio interface."""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault, InvalidRequest, QuireError
from engine.contract.lora import LoRARequest
from engine.contract.messages import PAUSE_MODES
from engine.contract.pooling_params import PoolingParams
from engine.contract.sampling_params import SamplingParams
from engine.core.request_admission import PauseMode
from engine.devices.threads import JoinedThread
from engine.model_loader.vllm_config import DecodingConfig
from engine.offline.engine_args import EngineArgs
from engine.offline.inputs import Prompt, resolve_prompt
from engine.offline.llm_engine import LLMEngine
from engine.offline.metrics import Metric
from engine.offline.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from engine.offline.tokenizer import OfflineTokenizer


class EnginePause(PauseMode):
    """The pause mode of an engine, and the futures that complete when no requests remain.

    It is only used in the engine's thread.
    """

    def __init__(self) -> None:
        super().__init__("The engine is paused until resume_generation.")
        self._waiting: list[Future[None]] = []

    def begin(self, mode: str) -> Future[None]:
        """Pause, and return a future that completes when no requests remain, or on `end`.

        Raises `InvalidRequest` for an unknown mode.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}.", param="mode")
        self._mode = mode
        settled: Future[None] = Future()
        self._waiting.append(settled)
        return settled

    def complete_when_idle(self, unfinished: bool) -> None:
        """Complete the futures unless there are unfinished requests."""
        if not unfinished:
            self._notify()

    def end(self) -> None:
        """Resume, and complete the futures."""
        self._mode = ""
        self._notify()

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for settled in waiting:
            if not settled.cancelled():
                settled.set_result(None)


T = TypeVar("T")
#: How long `shutdown` waits for a step in progress.
STOP_TIMEOUT_S = 60.0


class AsyncLLM:
    """An engine for concurrent coroutines, whose requests are batched.

    The engine runs in its own thread. Call `shutdown` at the end.

    Raises:
        ConfigError: a setting is out of range. ModelLoadError: the model can't be loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.needs_equal_requests:
            raise ConfigError(
                "distributed_executor_backend=external_launcher can't be used with AsyncLLM: ranks "
                "would get requests in different steps. Use LLM.",
                param="distributed_executor_backend",
            )
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._dead: BaseException | None = None
        self._stopped = False
        self._pause = EnginePause()
        engine: Future[LLMEngine] = Future()
        self._thread = JoinedThread(
            self._run, config, engine, name="quire-engine", tell_end=partial(self._calls.put, None)
        )
        self._thread.start()
        self.engine = engine.result()

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, start_engine_loop: bool = True, **_: Any
    ) -> AsyncLLM:
        """Create an engine with these settings. vLLM's other arguments are ignored."""
        return cls(engine_args.create_engine_config())

    def _run(self, config: EngineConfig, future: Future[LLMEngine]) -> None:
        try:
            engine = LLMEngine(config)
        except BaseException as error:
            future.set_exception(error)
            return
        future.set_result(engine)
        try:
            while self._run_pending_calls(wait=self._pause.is_frozen or not engine.has_work):
                if engine.has_work and not self._pause.is_frozen:
                    self._step(engine)
                self._pause.complete_when_idle(engine.has_unfinished_requests())
        except BaseException as error:
            self._dead = error
            for stream in list(self._streams.values()):
                stream.put(EngineFault(f"The engine failed: {error}"))
        finally:
            engine.shutdown()

    def _run_pending_calls(self, *, wait: bool) -> bool:
        """Run the functions that other threads have submitted. Returns False to stop the engine."""
        while True:
            try:
                call = self._calls.get(block=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False

    def _step(self, engine: LLMEngine) -> None:
        touched, pooled = engine.run_step()
        for collector in touched:
            stream = self._streams.get(collector.request_id)
            delta = collector.error or collector.pop_delta()
            if stream is not None and delta is not None:
                stream.put(delta)
        for result in pooled:
            stream = self._streams.get(result.request_id)
            if stream is not None:
                stream.put(result.error or result)

    async def _call_in_engine_thread(self, function: Callable[[], T]) -> T:
        self._check()
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._calls.put(call)
        return await asyncio.wrap_future(done)

    async def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        *,
        inputs: Prompt | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the request's results until `finished`: by default each has all output so far, see
        `sampling_params.output_kind`.

        A consumer that stops iterating aborts the request. `sampling_params` defaults to the
        model's, `request_id` to a new id. `inputs` is the old name of `prompt`.

        Raises:
            InvalidRequest: the request can't be served. EngineFault: the engine failed.
        """
        prompt = resolve_prompt(prompt, inputs)
        results = self._results(prompt, sampling_params, request_id, lora_request, priority)
        async with aclosing(results):
            async for result in results:
                yield result

    async def encode(
        self,
        prompt: Prompt | None = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        *,
        inputs: Prompt | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the single result of a pooling model. Raises the errors of `generate`."""
        prompt, params = resolve_prompt(prompt, inputs), pooling_params or PoolingParams()
        results = self._results(prompt, params, request_id, lora_request, priority)
        async with aclosing(results):
            async for result in results:
                yield result

    async def _results(
        self,
        prompt: Prompt,
        params: Any,
        requested_id: str | None,
        lora_request: Any,
        priority: int,
    ) -> AsyncGenerator[Any]:
        stream = _Stream(asyncio.get_running_loop())
        request_id = uuid.uuid4().hex if requested_id is None else requested_id

        def add() -> None:
            self._pause.check_accepts_requests()
            self.engine.add_request(
                request_id, prompt, params, lora_request=lora_request, priority=priority
            )
            self._streams[request_id] = stream

        await self._call_in_engine_thread(add)
        try:
            while True:
                result = await stream.results.get()
                if isinstance(result, QuireError):
                    raise result
                yield result
                if result.finished:
                    return
        finally:
            if self._streams.pop(request_id, None) is not None and not self._gone:
                self._calls.put(lambda: self.engine.abort_request(request_id))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one or several requests; unknown and finished ones are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call_in_engine_thread(lambda: self.engine.abort_request(request_ids))
        for one_id in request_ids:
            stream = self._streams.get(one_id)
            if stream is not None:
                stream.put(EngineFault(f"The request {one_id} was aborted.", code="aborted"))

    def get_tokenizer(self) -> OfflineTokenizer:
        """Return the tokenizer. Raises `InvalidRequest` with skip_tokenizer_init."""
        return self.engine.get_tokenizer()

    async def get_model_config(self) -> EngineConfig:
        """Return the settings, with the resolved context length."""
        return self.engine.get_model_config()

    async def get_decoding_config(self) -> DecodingConfig:
        """See `LLMEngine.get_decoding_config`."""
        return self.engine.get_decoding_config()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the supported tasks: "generate", or those of a pooling model."""
        return self.engine.get_supported_tasks()

    async def get_metrics(self) -> list[Metric]:
        """Return metrics by vLLM's names."""
        return await self._call_in_engine_thread(self.engine.get_metrics)

    @property
    def model_config(self) -> EngineConfig:
        return self.engine.get_model_config()

    async def do_log_stats(self) -> None:
        """Log statistics; see `LLMEngine.do_log_stats`."""
        await self._call_in_engine_thread(self.engine.do_log_stats)

    def start_background_loop(self) -> None:
        """Do nothing, as the engine's loop runs from the start."""

    async def check_health(self) -> None:
        """Raise `EngineFault` if the engine has failed or was shut down."""
        self._check()

    def _check(self) -> None:
        if self._gone:
            raise EngineFault(f"The engine doesn't run any more: {self._dead or 'shut down'}.")

    @property
    def _gone(self) -> bool:
        return self._stopped or self._dead is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine has neither failed nor been shut down."""
        return not self._gone

    @property
    def errored(self) -> bool:
        """Whether the engine has failed."""
        return self._dead is not None

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache; see `LLMEngine.reset_prefix_cache`."""
        reset = self.engine.reset_prefix_cache
        return await self._call_in_engine_thread(
            lambda: reset(reset_running_requests, reset_connector)
        )

    async def sleep(self, level: int = 1) -> None:
        """Release memory until `wake_up`; see `LLM.sleep`."""
        await self._call_in_engine_thread(lambda: self.engine.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocate memory; see `LLM.wake_up`."""
        await self._call_in_engine_thread(lambda: self.engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Return whether weights or KV cache are asleep."""
        return await self._call_in_engine_thread(self.engine.is_sleeping)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return await self._call_in_engine_thread(lambda: self.engine.add_lora(lora_request))

    async def pin_lora(self, lora_id: int) -> bool:
        return await self._call_in_engine_thread(lambda: self.engine.pin_lora(lora_id))

    async def remove_lora(self, lora_id: int) -> bool:
        return await self._call_in_engine_thread(lambda: self.engine.remove_lora(lora_id))

    async def list_loras(self) -> set[int]:
        return await self._call_in_engine_thread(self.engine.list_loras)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pause until `resume_generation`.

        Args:
            mode: "abort" ends running requests with an `EngineFault`, "wait" lets them finish, and
                both refuse new requests with `EnginePaused`. "keep" freezes running requests, and
                queues new ones.
            clear_cache: also clear the prefix cache, except with "keep", whose requests use it.

        Raises:
            InvalidRequest: the mode is unknown.
        """
        settled = await self._call_in_engine_thread(lambda: self._pause.begin(mode))
        if mode == "abort":
            await self.abort(list(self._streams))
        if mode == "wait":
            await asyncio.wrap_future(settled)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Resume after `pause_generation`."""
        await self._call_in_engine_thread(self._pause.end)

    async def is_paused(self) -> bool:
        """Return whether generation is paused."""
        return bool(self._pause)

    async def start_profile(self, folder: str | None = None) -> None:
        """Start a profile; see `LLMEngine.start_profile`."""
        await self._call_in_engine_thread(lambda: self.engine.start_profile(folder))

    async def stop_profile(self) -> str:
        """Stop the profile and return its file."""
        return await self._call_in_engine_thread(self.engine.stop_profile)

    async def collective_rpc(self, method: str | Callable[..., Any], **arguments: Any) -> list[Any]:
        return await self._call_in_engine_thread(
            lambda: self.engine.collective_rpc(method, **arguments)
        )

    def shutdown(self) -> None:
        """Stop the engine's thread and release its memory. Running requests fail."""
        if self._stopped:
            return
        self._stopped = True
        self._calls.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        for stream in list(self._streams.values()):
            stream.put(EngineFault("The engine was shut down."))


class _Stream:
    """A queue of results for a coroutine, filled by the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.results: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, result: Any) -> None:
        """Add a result, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.results.put_nowait, result)


AsyncLLMEngine = AsyncLLM
