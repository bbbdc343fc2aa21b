"""One replica as a process: `python -m engine.serving --replica-id ID --model FOLDER`.

Requests come from the replica's inbox stream, outputs go to each gateway's outbox stream, and a
heartbeat reports its state. On SIGTERM it drains: it reads no new requests and finishes the running
ones.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import shlex
import socket
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import redis
from tqdm import tqdm

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault, PeerFault, QuireError
from engine.contract.message_version import MESSAGE_VERSION, UnreadableRequest
from engine.contract.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EngineRequest,
    ErrorInfo,
    FollowPrefill,
    Heartbeat,
    OutboxBatch,
    TokenDelta,
)
from engine.contract.replica_state import (
    WARM_UP,
    LoadPhase,
    Numerics,
    observe_load_phases,
    report_load_phase,
)
from engine.contract.stat_loggers import StatLoggers
from engine.core.engine_core import EngineCore
from engine.core.profiler import ReplicaProfiler
from engine.core.stats import RateMeter, StatsLogger
from engine.core.warmup import warm_up
from engine.devices.package_calls import describe_long_call
from engine.kv_transfer.storage_queue import SAVE_TIMEOUT_S
from engine.lora.fetcher import AdapterFetcher
from engine.scheduler import Request, Sequence
from engine.serving.heartbeat import HeartbeatWriter, model_info, process_stats, publish_load_report
from engine.serving.inbox import InboxReader, IncarnationFence, ReceivedMessage
from engine.serving.kv_map import KVMapBuilder, KVMapPublisher
from engine.serving.operator_commands import AdapterControls, Pause, abort_requests, unload
from engine.serving.outbox import OutboxWriter, StepOutput
from engine.serving.probes import ProbeServer, ReplicaProgress
from engine.serving.replica_metrics import exposition
from engine.system.step_record import SharedStepWriter


class InFlightRecord:
    """Requests in progress: in steps in flight, waiting for an adapter, or being admitted.

    Requests that merely wait in the queue aren't recorded.
    """

    def __init__(self, recorder: SharedStepWriter) -> None:
        self._recorder = recorder
        #: Sequences of the list that was written last; None: it wasn't a step's.
        self._sequences: list[Sequence] | None = None

    @property
    def ids(self) -> list[str]:
        """The requests, unordered."""
        return self._recorder.request_ids

    def record_step(self, under_way: list[Sequence], reading: Iterable[Request]) -> None:
        """Record a step: sequences in flight, and requests whose adapter is being loaded."""
        ids = [request.request_id for request in reading]
        # From step to step the decodes are mostly the same.
        if not ids and under_way == self._sequences:
            return
        self._recorder.write([*dict.fromkeys(ids), *_other_request_ids(ids, under_way)])
        self._sequences = None if ids else under_way

    def record_fault(self, reason: str) -> None:
        """Record why the replica stops."""
        self._recorder.write_fault(reason)

    def acquit(self) -> None:
        """Record no requests: another replica is the cause of this one's end."""
        self._recorder.write([])

    def record_request(self, request_id: str, under_way: list[Sequence]) -> None:
        """Record a request being admitted, in addition to the steps in flight."""
        self._recorder.write([request_id, *_other_request_ids([request_id], under_way)])
        self._sequences = None


def _other_request_ids(ids: list[str], sequences: list[Sequence]) -> Iterator[str]:
    """Yield the requests of sequences, without duplicates and without those in `ids`."""
    seen = set(ids)
    for sequence in sequences:
        request_id = sequence.request.message.request_id
        if request_id not in seen:
            seen.add(request_id)
            yield request_id


log = logging.getLogger("engine.serving")


def load_core(config: EngineConfig, on_progress: Callable[[float], None]) -> EngineCore:
    """Load and warm up the engine; `on_progress` gets the loaded fraction of its weights."""
    started = time.perf_counter()
    # A supervisor that forwards this to a terminal says so; otherwise tqdm checks for one itself.
    hidden = False if os.environ.get("QUIRE_TERMINAL") else None
    with tqdm(desc="Loading weights", unit="layer", disable=hidden, file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            on_progress(done / total)

        core = EngineCore(config, progress)
    report_load_phase(WARM_UP)
    warm_up(core)
    _describe(core)
    log.info("Ready after %.2f s", time.perf_counter() - started)
    return core


def _describe(core: EngineCore) -> None:
    facts, scheduler, capacity = core.facts, core.scheduler, core.capacity
    log.info(
        "Model %s: %s, %.1f M parameters, dtype %s, context %d, loaded in %.2f s",
        core.config.name,
        facts.architecture,
        facts.num_parameters / 1e6,
        facts.dtype,
        facts.max_model_len,
        facts.load_seconds,
    )
    if facts.runs_whole_prompts:
        budget = capacity.token_budget
        log.info("No KV cache: prompts run whole; token budget %d a step", budget)
    else:
        log.info(
            "KV cache: %d blocks of %d tokens, a request up to %d; maximum concurrency at %d "
            "tokens a request: %.1fx; token budget %d a step, %d of it for prompts while "
            "others decode",
            capacity.num_blocks,
            core.config.block_size,
            scheduler.capacity_tokens,
            facts.max_model_len,
            scheduler.max_concurrency(facts.max_model_len),
            capacity.token_budget,
            min(scheduler.limits.share.max_prompt_tokens, capacity.token_budget),
        )


def rejection_deltas(request_id: str, num_sequences: int, error: QuireError) -> list[TokenDelta]:
    """Return a final delta with the error for each output."""
    info = ErrorInfo.of(error)
    return [
        TokenDelta(request_id=request_id, index=index, finish_reason="error", error=info)
        for index in range(num_sequences)
    ]


_IDLE_WAIT_S = 0.2
#: Maximum time spent on messages between two steps.
MESSAGE_BUDGET_S = 0.01
_REMEMBERED_IDS = 8192
#: Maximum time for which a step keeps the GIL from the threads that read requests and write tokens.
_SWITCH_INTERVAL_S = 0.0005
#: A step that takes longer has its requests named in the heartbeat.
_LONG_STEP_S = 5.0
#: Exit status of a replica that can't continue, for a reason other than its model.
EXIT_FAULT = 70


class EngineService:
    """The engine loop between the inbox and the outboxes."""

    def __init__(
        self,
        config: EngineConfig,
        replica_id: str,
        client: redis.Redis,
        prefix: str,
        *,
        spare: bool = False,
        health_port: int | None = None,
        endpoint: str = "",
        adapter_fetch_command: str | None = None,
    ) -> None:
        """Raises: `ConfigError` if `health_port` can't be bound, or for `endpoint`."""
        self.config, self.spare, self._endpoint = config, spare, _check_endpoint(endpoint)
        self.replica_id = replica_id
        self.incarnation = uuid.uuid4().hex
        self.state = "loading"
        self.detail = ""
        self.progress = 0.0
        self.progress_at = time.time()
        self.loading: LoadPhase | None = None
        self.core: EngineCore | None = None
        self.numerics: Numerics | None = None
        self.draining = False
        self._redis, self._prefix = client, prefix
        fence = IncarnationFence(client, prefix, replica_id, self.incarnation)
        inbox = redis_keys.inbox_key(replica_id, prefix)
        self._reader = InboxReader(client, inbox, self.incarnation, fence)
        publisher = KVMapPublisher(client, prefix, replica_id)
        self._block_map = KVMapBuilder(publisher, replica_id, self.incarnation)
        self._heartbeat = HeartbeatWriter(client, prefix, self.heartbeat, self._block_map.watch)
        self._writer = OutboxWriter(
            client, prefix, replica_id, self.incarnation, self._heartbeat.write_now
        )
        self._gateways: dict[str, str] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._output = StepOutput()
        self._pause = Pause()
        self._sleep_level = 0
        self._in_flight = InFlightRecord(SharedStepWriter.inherited(self.incarnation))
        self._adapters = AdapterControls()
        self._adapter_fetch_command = adapter_fetch_command
        self._profiler = ReplicaProfiler()
        self._probes: ProbeServer | None = None
        if health_port is not None:
            self._probes = ProbeServer(
                health_port,
                lambda: ReplicaProgress(self.state, self.progress_at),
                lambda: exposition(self.heartbeat()),
            )
        self._throughput = RateMeter()
        self._stats_log = StatsLogger(enabled=not config.disable_log_stats)
        self._stat_loggers: StatLoggers | None = None

    def run(self, drain_timeout: float) -> int:
        """Load, serve until draining begins, drain. Returns the process's exit status."""
        self._heartbeat.start()
        if self._probes is not None:
            self._probes.start()
        try:
            self._stat_loggers = StatLoggers(self.config, self.replica_id)
            self.core = self._load()
        except (QuireError, MemoryError) as error:
            no_memory = f"there isn't enough memory: {error}".removesuffix(": ")
            reason = error.message if isinstance(error, QuireError) else no_memory
            log.error("The model can't be loaded: %s", reason)
            self.state, self.detail = "failed", reason
            self._heartbeat.write_now()
            self._heartbeat.stop(self.replica_id, remove_key=False)
            return 1
        if self._adapter_fetch_command:
            self.core.adapters.fetcher = AdapterFetcher(shlex.split(self._adapter_fetch_command))
        _freeze()
        self.numerics = self.core.executor.read_numerics()
        publish_load_report(self._redis, self.replica_id, self._prefix, self.core)
        self.state = "ready"
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if (connector := self.core.scheduler.kv_connector) and self.core.only_saves_kv:
            # Once a prompt is reported as computed, another replica loads its blocks at once.
            self._writer.on_write = partial(connector.wait_until_saved, SAVE_TIMEOUT_S)
        self._writer.start()
        self._reader.start()
        self._heartbeat.write_now()
        log.info("Replica %s serves %s.", self.replica_id, self.config.name)
        status = 0
        self.core.on_step_start = self._record_step
        try:
            self._serve(self.core, drain_timeout)
        except EngineFault as error:
            # Gateways continue on other replicas, and the supervisor starts a new process.
            log.critical("The replica ends: %s", error.message)
            self._in_flight.record_fault(error.message)
            status = EXIT_FAULT
            if isinstance(error, PeerFault):
                self._in_flight.acquit()
                status = protocol.EXIT_PEER_FAULT
            self._reader.stop()
        self._writer.close(timeout=10.0)
        # Requests left over by a drain didn't cause the exit.
        in_flight = self._in_flight.ids if status else []
        self._heartbeat.stop(self.replica_id, remove_key=True, in_flight=in_flight)
        self._stat_loggers.close(self.core.snapshot())
        self.core.shutdown()
        log.info("Replica %s has stopped.", self.replica_id)
        return status

    def drain(self) -> None:
        """Accept no new requests, finish running ones, then stop."""
        self.draining = True
        self.state = "draining"
        self._reader.stop()

    def _load(self) -> EngineCore:
        def progress(part: float) -> None:
            self.progress, self.progress_at = part, time.time()

        def watch(phase: LoadPhase) -> None:
            self.loading, self.progress_at = phase, time.time()

        with observe_load_phases(watch):
            core = load_core(self.config, progress)
        self.loading = None
        return core

    def _serve(self, core: EngineCore, drain_timeout: float) -> None:
        deadline = float("inf")
        while True:
            frozen = self._pause.is_frozen
            self._handle_messages(core, wait=frozen or not core.has_work)
            if core.has_work and not frozen:
                self._queue_deltas(core.step())
                if path := self._profiler.step():
                    log.info("The profile was long enough: %s", path)
            for message in self._pause.pop_completed(core):
                self._reply(message, ok=True)
            for message, reason in self._adapters.pop_finished():
                self._reply(message, ok=not reason, detail=reason)
            core.adapters.evict_idle(time.monotonic())
            core.check_health()
            self._send_outputs(core)
            self.progress_at = time.time()
            self._block_map.publish_if_due(core.scheduler)
            self._stats_log.log_if_due(core.snapshot)
            if self._stat_loggers is not None:
                self._stat_loggers.maybe(core.snapshot)
            if self.draining:
                deadline = min(deadline, time.time() + drain_timeout)
                if not (core.requests or core.is_aligning) or time.time() > deadline:
                    break
        if core.requests:
            # Gateways see this incarnation end and continue elsewhere with the tokens they have.
            log.warning("Drained for %.0f s; %d requests left.", drain_timeout, len(core.requests))

    def _record_step(self, under_way: list[Sequence]) -> None:
        reading = self.core.adapters.loading_adapters if self.core else ()
        self._in_flight.record_step(under_way, reading)

    def _handle_messages(self, core: EngineCore, *, wait: bool) -> None:
        """Handle pending messages; when idle, wait a little for the first.

        If thousands arrive at once, only a few are handled between two steps, so that running
        requests keep getting tokens.
        """
        try:
            entry = self._reader.messages.get(timeout=_IDLE_WAIT_S if wait else 0.0)
            until = time.monotonic() + MESSAGE_BUDGET_S
            while True:
                self._handle(core, *entry)
                if core.has_work and time.monotonic() > until:
                    return
                entry = self._reader.messages.get_nowait()
        except queue.Empty:
            return

    def _handle(self, core: EngineCore, entry_id: bytes, message: ReceivedMessage) -> None:
        if isinstance(message, EngineRequest):
            self._add(core, entry_id, message)
            return
        if isinstance(message, UnreadableRequest):
            self._gateways[message.request_id] = message.gateway_id
            deltas = rejection_deltas(message.request_id, message.num_sequences, message.error)
            self._queue_deltas(deltas)
        elif isinstance(message, AbortRequest):
            self._queue_deltas(core.abort(message.request_id, message.index, message.finish_reason))
        elif isinstance(message, FollowPrefill):
            core.follow_prefill(message.request)
        else:
            self._control(core, message)
        self._output.done.append(entry_id)

    def _add(self, core: EngineCore, entry_id: bytes, message: EngineRequest) -> None:
        request_id = message.request_id
        if request_id in self._gateways or request_id in self._recent:
            fields = {
                "request_id": request_id,
                "tenant": message.tenant,
                "model": self.config.name,
            }
            text = "Request %s of tenant %s came twice; the second is dropped."
            log.info(text, request_id, message.tenant, extra={"request": fields})
            self._output.done.append(entry_id)
            return
        self._gateways[request_id] = message.gateway_id
        try:
            self._pause.check_accepts_requests()
            self._in_flight.record_request(request_id, core.sequences_in_flight)
            core.add_request(message, on_done=lambda: self._output.done.append(entry_id))
        except QuireError as error:
            deltas = rejection_deltas(request_id, message.sampling.num_sequences, error)
            self._queue_deltas(deltas)
            self._output.done.append(entry_id)

    def _control(self, core: EngineCore, message: ControlRequest) -> None:
        """Run an operator's command, and reply if a gateway sent it."""
        ok, detail = True, ""
        if message.command in ("sleep", "wake_up"):
            ok, detail = self._sleep_or_wake(core, message)
        elif message.command == "reset_prefix_cache":
            if message.running:
                self._queue_deltas(core.preempt_all())
            ok = core.reset_prefix_cache()
            detail = "" if ok else "Blocks are in use."
        elif message.command == "reset_encoder_cache":
            ok = core.reset_encoder_cache()
            detail = "" if ok else "Outputs of the encoder are in use."
        elif message.command == "check_integrity":
            try:
                core.check_integrity()
            except RuntimeError as error:
                ok, detail = False, str(error)
        elif message.command == "drain":
            self.drain()
        elif message.command == "pause":
            ok, detail, deltas = self._pause.begin(core, message)
            self._queue_deltas(deltas)
            if ok and message.mode == "wait":
                return  # the reply follows once nothing runs
        elif message.command == "resume":
            for waiting in self._pause.end():
                self._reply(waiting, ok=False, detail="It was resumed before all had ended.")
        elif message.command == "abort_requests":
            deltas = abort_requests(core, message.request_ids)
            self._queue_deltas(deltas)
            detail = f"{len({delta.request_id for delta in deltas})} requests were aborted."
        elif message.command == "load_adapter":
            detail = self._adapters.begin_load(core.adapters, message)
            if not detail:
                return  # the reply follows once it is loaded
            ok = False
        elif message.command == "unload_adapter":
            ok, detail = unload(core.adapters, message)
        elif message.command in ("start_profile", "stop_profile"):
            start = message.command == "start_profile"
            ok, detail = self._profiler.start() if start else self._profiler.stop()
        else:
            ok, detail = False, f"Unknown command {message.command!r}."
        self._reply(message, ok=ok, detail=detail)

    def _reply(self, message: ControlRequest, *, ok: bool, detail: str = "") -> None:
        if message.gateway_id:
            reply = ControlReply(control_id=message.control_id, ok=ok, detail=detail)
            self._batch(message.gateway_id).replies.append(reply)
        elif not ok:
            log.warning("%s is refused: %s", message.command, detail)

    def _sleep_or_wake(self, core: EngineCore, message: ControlRequest) -> tuple[bool, str]:
        """Run the command; returns (whether it succeeded, error message)."""
        try:
            if message.command == "sleep":
                core.check_sleep(message.level)
                gc.unfreeze()  # reference cycles may hold weights that are to be freed
                self._queue_deltas(core.sleep(message.level))
                self._sleep_level = message.level
            else:
                slept = core.is_sleeping
                core.wake_up(message.tags or None)
                if slept and not core.is_sleeping:
                    _freeze()
                # The weights may have been read again, from changed files.
                self.numerics = core.executor.read_numerics()
        except QuireError as error:
            log.warning("%s is refused: %s", message.command, error.message)
            return False, error.message
        finally:
            if not self.draining:
                self.state = "sleeping" if core.is_sleeping else "ready"
        return True, ""

    def _queue_deltas(self, deltas: list[TokenDelta]) -> None:
        """Add deltas to the batches of their gateways."""
        for delta in deltas:
            gateway_id = self._gateways.get(delta.request_id)
            if gateway_id is not None:
                self._batch(gateway_id).deltas.append(delta)

    def _batch(self, gateway_id: str) -> OutboxBatch:
        batch = self._output.batches.get(gateway_id)
        if batch is None:
            step = self.core.stats.steps_total if self.core else 0
            batch = OutboxBatch(replica_id=self.replica_id, incarnation=self.incarnation, step=step)
            self._output.batches[gateway_id] = batch
        return batch

    def _send_outputs(self, core: EngineCore) -> None:
        """Queue the step's output for writing and drop finished requests."""
        output = self._output
        if not output.batches and not output.done:
            return
        for batch in output.batches.values():
            for delta in batch.deltas:
                if delta.finish_reason and delta.request_id not in core.requests:
                    self._forget(delta.request_id)
        self._writer.put(output)
        self._output = StepOutput()

    def _forget(self, request_id: str) -> None:
        """Remember a finished id for a while, so that a duplicate delivery isn't run again."""
        self._gateways.pop(request_id, None)
        self._recent[request_id] = None
        while len(self._recent) > _REMEMBERED_IDS:
            self._recent.popitem(last=False)

    def heartbeat(self) -> Heartbeat:
        """Return the replica's current state."""
        core = self.core
        return Heartbeat(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            state=self.state,
            model=model_info(self.config, core),
            at=time.time(),
            # The older of the two: a replica that can't read its inbox serves no requests.
            progress_at=min(self.progress_at, self._reader.progress_at),
            pid=os.getpid(),
            host=socket.gethostname(),
            detail=self.detail or describe_long_call(protocol.STALL_TIMEOUT_S),
            load_progress=self.progress,
            stats=self._throughput.last_rates(core.snapshot()) if core else protocol.EngineStats(),
            paused=bool(self._pause),
            process=process_stats(),
            sleep_level=self._sleep_level if self.state == "sleeping" else 0,
            numerics=self.numerics,
            spare=self.spare,
            adapters=core.adapters.states() if core else [],
            loading=self.loading,
            message_version=MESSAGE_VERSION,
            endpoint=self._endpoint,
            cached_prefixes=core.cached_prefixes.keys() if core else frozenset(),
            kv_handover=core.kv_handover if core else None,
            held=self._in_flight.ids if time.time() - self.progress_at > _LONG_STEP_S else None,
        )


def _check_endpoint(endpoint: str) -> str:
    """HOST:PORT, with brackets around an IPv6 address. Raises `ConfigError`."""
    host, _, port = endpoint.rpartition(":")
    if endpoint and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"endpoint must be HOST:PORT; got {endpoint!r}.", param="endpoint")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else endpoint


def _freeze() -> None:
    """Exclude loaded objects from garbage collection: traversing them takes longer than a step."""
    gc.collect()
    gc.freeze()
