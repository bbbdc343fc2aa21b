"""A replica's heartbeat: the model's facts, the process, and the thread that writes them."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec
import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import Heartbeat, ModelInfo, ReplicaEvent
from engine.contract.replica_state import ProcessStats, watch_key
from engine.core.engine_core import EngineCore
from engine.quantization.report import summary
from engine.serving.inbox import WRITE_IF_CURRENT, IncarnationReplaced
from engine.system.redis_client import is_temporary
from engine.text.chat_template import read_template

log = logging.getLogger(__name__)

RETENTION_S = 30 * 24 * 3600


def publish_load_report(
    client: redis.Redis, replica_id: str, prefix: str, core: EngineCore
) -> None:
    """Write the load report by layer; the replica serves even if that fails."""
    key = redis_keys.load_report_key(replica_id, prefix)
    try:
        client.set(key, msgspec.json.encode(core.facts.load_report), ex=RETENTION_S)
    except redis.RedisError as error:
        log.warning("The load report can't be written (%s).", error)


def model_info(config: EngineConfig, core: EngineCore | None) -> ModelInfo:
    """Return the model's facts for gateways; most are empty while it is loading."""
    if core is None:
        return ModelInfo(
            name=config.name, path=config.model, max_model_len=0, vocab_size=0, dtype=""
        )
    facts = core.facts
    return ModelInfo(
        name=config.name,
        path=facts.tokenizer_folder,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        max_logprobs=config.max_logprobs,
        kv_capacity_tokens=(0 if facts.runs_whole_prompts else core.scheduler.capacity_tokens),
        eos_token_ids=list(facts.eos_token_ids),
        default_sampling=facts.default_sampling,
        tool_call_parser=config.tool_call_parser or "",
        chat_template=read_template(config.chat_template),
        reasoning_parser=config.reasoning_parser or "",
        tasks=facts.tasks,
        pooling=None if facts.pooling is None else facts.pooling.info,
        cache_config=cache_config(config, core),
        weights=summary(facts.load_report),
        io_processor=facts.io_processor,
        prompt_embeds_size=(
            facts.hidden_size if config.enable_prompt_embeds and facts.takes_embeds else 0
        ),
        sees=facts.sees,
        encoder_length=facts.encoder_length,
        num_mels=facts.num_mels,
        max_encoder_tokens=facts.max_encoder_tokens,
        decoder_start_ids=list(facts.decoder_start_ids),
        num_ranks=config.world_size,
        max_images=config.max_media("image"),
        max_videos=config.max_media("video") if facts.takes_videos else 0,
        max_audios=config.max_media("audio") if facts.hears else 0,
        pruning_rates=config.pruning_rates,
        mm_processor_kwargs=config.mm_processor_kwargs or {},
        media_io_kwargs=config.media_io_kwargs or {},
    )


def cache_config(config: EngineConfig, core: EngineCore) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`: vLLM's, and additional ones of Quire."""
    capacity, windows = core.capacity, core.scheduler.kv.windows
    values = {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "calculate_kv_scales": config.calculate_kv_scales,
        "cpu_kvcache_space": config.cpu_kvcache_space,
        "cpu_offload_gb": 0,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "is_attention_free": core.facts.runs_whole_prompts,
        "kv_cache_max_concurrency": round(
            core.scheduler.max_concurrency(core.facts.max_model_len), 2
        ),
        "kv_cache_memory_bytes": (
            capacity.num_blocks * config.block_size * capacity.kv_bytes_per_token
        ),
        "kv_cache_size_tokens": capacity.num_blocks * config.block_size,
        "num_cpu_blocks": 0,
        "num_gpu_blocks": capacity.num_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": max((window for window in windows if window), default=None),
        "swap_space": config.swap_space,
        "swap_space_bytes": int(config.swap_space * 2**30),
    }
    return {name: str(value) for name, value in values.items()}


_PROC = Path("/proc/self")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_stats() -> ProcessStats:
    """Current values; without /proc, memory and file descriptors are 0."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    stats = ProcessStats(
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        start_time=_start_time(),
        max_fds=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    for generation in gc.get_stats():
        stats.gc_collections.append(generation["collections"])
        stats.gc_collected.append(generation["collected"])
        stats.gc_uncollectable.append(generation["uncollectable"])
    try:
        virtual, resident = (_PROC / "statm").read_text().split()[:2]
        stats.virtual_bytes, stats.resident_bytes = int(virtual) * _PAGE, int(resident) * _PAGE
        stats.open_fds = len(os.listdir(_PROC / "fd"))
    except OSError:
        pass  # not Linux
    return stats


@lru_cache(maxsize=1)
def _start_time() -> float:
    """Return the start of this process, in seconds since the epoch."""
    try:
        # Split after the command's name, which may contain anything, including brackets.
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + int(fields[19]) / _TICKS
    except OSError:
        return time.time()


#: KEYS: the owner, the heartbeat, the replica ids, the KV map's watch key. ARGV: incarnation,
#: heartbeat, TTL, replica id, whether this is the first heartbeat, which takes over the id.
_BEAT = (
    "if ARGV[5] == '0' then\n"
    + WRITE_IF_CURRENT
    + """
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[4])
return redis.call('GET', KEYS[4]) or 1
"""
)


class HeartbeatWriter(threading.Thread):
    """Writes `make()` every interval with a TTL; `write_now()` writes one at once.

    `tell_watched` is called after each heartbeat with the value of `watch_key`, b"" if unset.

    Both raise `IncarnationReplaced` once another process serves under the replica id.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        make: Callable[[], Heartbeat],
        tell_watched: Callable[[bytes], None] = lambda number: None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._redis = client
        self._prefix = prefix
        self._make, self._tell_watched = make, tell_watched
        self._stopping = threading.Event()
        self._writing = threading.Lock()
        self._script = client.register_script(_BEAT)
        self._written_state = ""
        self._claimed = False

    def run(self) -> None:
        while not self._stopping.is_set():
            self.write_now()
            self._stopping.wait(protocol.HEARTBEAT_INTERVAL_S)

    def write_now(self) -> None:
        """Write a heartbeat now. If Redis can't accept it, the next heartbeat tries again."""
        # One at a time, so that no older state overwrites a newer one.
        with self._writing:
            written = self._write(self._make())
        if not written:
            time.sleep(protocol.HEARTBEAT_INTERVAL_S)

    def _write(self, heartbeat: Heartbeat) -> bool:
        """Returns False if Redis couldn't be reached or refused it."""
        replica_id, prefix = heartbeat.replica_id, self._prefix
        try:
            written = self._script(
                keys=[
                    redis_keys.owner_key(replica_id, prefix),
                    redis_keys.replica_key(replica_id, prefix),
                    redis_keys.replicas_key(prefix),
                    watch_key(replica_id, prefix),
                ],
                args=[
                    heartbeat.incarnation,
                    protocol.encode(heartbeat),
                    int(protocol.HEARTBEAT_TTL_S * 1000),
                    replica_id,
                    int(not self._claimed),
                ],
            )
            self._claimed = True
            if written and heartbeat.state == "ready" != self._written_state:
                # Requests wait for it: the notification saves gateways from polling.
                self._publish_event(replica_id, heartbeat.incarnation, alive=True)
        except redis.RedisError as error:
            if not is_temporary(error):
                raise
            log.warning("The heartbeat can't be written (%s).", error)
            return False
        if not written:
            raise IncarnationReplaced(replica_id)
        self._written_state = heartbeat.state
        self._tell_watched(written if isinstance(written, bytes) else b"")
        return True

    def _publish_event(
        self, replica_id: str, incarnation: str, *, alive: bool, in_flight: list[str] | None = None
    ) -> None:
        news = ReplicaEvent(
            replica_id=replica_id, incarnation=incarnation, alive=alive, held=in_flight
        )
        self._redis.publish(redis_keys.replica_events_channel(self._prefix), protocol.encode(news))

    def stop(
        self, replica_id: str, *, remove_key: bool, in_flight: list[str] | None = None
    ) -> None:
        """Stop. With `remove_key` the key is deleted at once, so that gateways needn't wait for the
        TTL.

        `in_flight`: requests that may have caused the exit.
        """
        self._stopping.set()
        self.join(timeout=2.0)
        if not remove_key:
            return
        try:
            self._redis.delete(
                redis_keys.replica_key(replica_id, self._prefix),
                redis_keys.owner_key(replica_id, self._prefix),
            )
            self._redis.srem(redis_keys.replicas_key(self._prefix), replica_id)
            self._publish_event(
                replica_id, self._make().incarnation, alive=False, in_flight=in_flight
            )
        except redis.RedisError as error:
            log.warning("The heartbeat can't be removed (%s); it will expire.", error)
