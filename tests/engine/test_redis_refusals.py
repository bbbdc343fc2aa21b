"""FAULTS 47: a Redis that answers and can't serve now ends no replica; the model stays loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from engine.system.redis_client import error_code_of, is_temporary
from tests.engine.replica import Gateway, replica
from tests.services import running_redis

#: What makes Redis refuse writes, and what ends that.
REFUSALS = {
    "OOM": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "READONLY": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
}


@pytest.fixture(scope="module")
def gateway(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A replica beside a Redis of its own; at the end it must be the process that it was."""
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        prefix = f"refused{time.time_ns()}"
        with replica(url, prefix, model_folder("llama")) as process:
            gateway = Gateway(url, prefix)
            gateway.await_state("ready")
            yield gateway
            assert process.poll() is None


@pytest.mark.system
@pytest.mark.parametrize("word", REFUSALS)
def test_fault_47_a_replica_waits_until_redis_serves_again(gateway: Gateway, word: str) -> None:
    refuse, serve = REFUSALS[word]
    incarnation = gateway.await_state("ready").incarnation
    # Slow steps: some of them end while Redis refuses.
    gateway.request(word, [5, 6], max_tokens=200, logprobs=20)
    gateway.wait(lambda: len(gateway.tokens(word)) > 1)
    gateway.redis.execute_command(*refuse)
    try:
        with pytest.raises(ResponseError) as error:
            gateway.redis.set("x", "y")
        assert error_code_of(error.value) == word
        # Three heartbeats, and the outputs of many steps.
        time.sleep(1.5)
    finally:
        gateway.redis.execute_command(*serve)
    gateway.finish(word)
    assert len(gateway.tokens(word)) == 200
    gateway.wait(lambda: gateway.pending() == 0)
    assert gateway.await_state("ready").incarnation == incarnation


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM"),
        (ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots."), "MISCONF"),
        (ResponseError("Command # 1 (XADD x) of pipeline caused error: MISCONF no."), "MISCONF"),
        (ResponseError("LOADING Redis is loading the dataset in memory"), "LOADING"),
        (ResponseError("WRONGTYPE Operation against a key"), None),
        (ResponseError("unknown command 'MISCONF'"), None),
        (redis.ConnectionError("OOM"), None),
    ],
    ids=str,
)
def test_refusals_are_told_from_mistakes(error: redis.RedisError, word: str | None) -> None:
    assert error_code_of(error) == word
    assert is_temporary(error) == (word is not None or isinstance(error, redis.ConnectionError))
