"""Engines that share experts say what one engine says of each one's own requests, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from engine.contract import redis_keys
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault, PeerFault
from engine.contract.messages import EXIT_PEER_FAULT, decode_replica_event
from engine.distributed.memory import GATHER_TIMEOUT_S
from engine.executor.expert_lockstep import ExpertLockstep
from engine.executor.expert_peers import launched_rank
from engine.executor.external_launcher import ExternalExecutor
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.executor.rank_process import RankProcess
from engine.executor.uniproc_executor import StepSkipped
from kernels.errors import RankError
from kernels.interface import RankGroup
from tests.engine.families.conftest import checkpoint
from tests.engine.ranks.test_tensor_parallel import running
from tests.engine.replica import Gateway, replica
from tests.survey.tiny import prompts
from tests.waiting import free_port

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = (1, 47, 16, 64, 90)
#: An engine that does what it reads, a line of JSON each: the prompts' numbers and the tokens of an
#: output. An empty line: it ends.
PROGRAM = """
import json, sys, time
from pathlib import Path
from engine import SamplingParams
from tests.engine.ranks.test_data_parallel import LENGTHS
from tests.engine.ranks.test_tensor_parallel import running
from tests.engine.replica import Gateway, replica
from tests.survey.tiny import prompts
settings = dict(distributed_executor_backend="external_launcher", data_parallel_size=2,
                enable_expert_parallel=True, skip_tokenizer_init=True, num_threads=1)
settings |= json.loads(sys.argv[2])
with running(Path(sys.argv[1]), settings.pop("tensor_parallel_size", 1), **settings) as llm:
    experts = llm.core.executor.worker.loaded.model.weights[-1].experts.layers
    print(json.dumps([type(layer).__name__ for layer in experts.down]), flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        numbers, tokens = json.loads(line)
        inputs = [{"prompt_token_ids": prompts(LENGTHS)[number]} for number in numbers]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        start = time.monotonic()
        try:
            results = llm.generate(inputs, params, use_tqdm=False)
            output = [[list(one.outputs[0].token_ids),
                       [sorted(entry.logprob for entry in row.values())
                        for row in one.outputs[0].logprobs]] for one in results]
        except Exception as error:
            output = [type(error).__name__, str(error), time.monotonic() - start]
        print(json.dumps(output), flush=True)
"""
Ask = tuple[Sequence[int], int]


class Engine:
    """A process with `PROGRAM`."""

    def __init__(self, folder: Path, rank: int, port: int, settings: dict[str, Any]) -> None:
        launched = {
            "RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), json.dumps(settings)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {name: str(value) for name, value in launched.items()},
        )  # fmt: skip

    def ask(self, numbers: Sequence[int], tokens: int) -> None:
        assert self.process.stdin is not None
        print(json.dumps([list(numbers), tokens]), file=self.process.stdin, flush=True)

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def two_engines(folder: Path, **settings: Any) -> Iterator[list[Engine]]:
    """Their placed experts have been read."""
    port = free_port()
    engines = [Engine(folder, rank, port, settings) for rank in range(2)]
    try:
        placed = [engine.read() for engine in engines]
        num_ranks = 2 * settings.get("tensor_parallel_size", 1)
        num_local = [len(kinds) - kinds.count("AbsentLinear") for kinds in placed]
        assert num_local == [len(placed[0]) // num_ranks] * 2
        yield engines
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.communicate()


def expected_outputs(folder: Path, tokens: int, **settings: Any) -> list[Any]:
    from engine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    with running(folder, 1, skip_tokenizer_init=True, **settings) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(LENGTHS)]
        results = llm.generate(inputs, params, use_tqdm=False)
    return [
        [
            list(result.outputs[0].token_ids),
            [
                sorted(entry.logprob for entry in row.values())
                for row in result.outputs[0].logprobs or []
            ],
        ]
        for result in results
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        ("mixtral", {"tensor_parallel_size": 2}),
        # A latent's heads aren't split; an expert of all tokens is.
        pytest.param("deepseek_v3", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            "gpt_oss",
            {"tensor_parallel_size": 2, "async_scheduling": True},
            marks=pytest.mark.slow,
        ),
        # Experts beside one of all tokens, layers that run one by one; chunks of prompts.
        pytest.param("deepseek_v3", {"max_num_batched_tokens": 16}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"async_scheduling": True}, marks=pytest.mark.slow),
    ],
)
def test_engines_that_share_experts_say_what_one_says_whoever_has_work(
    name: str, options: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(name)
    expected = expected_outputs(folder, 24)  # of one rank
    short = [[tokens[:5], scores[:5]] for tokens, scores in expected]
    with two_engines(folder, **options) as (one, two):
        one.ask([0, 1, 2], 24)  # the other one ends earlier, and goes on with its experts
        two.ask([4], 5)
        assert one.read() == expected[:3]
        assert two.read() == short[4:]
        two.ask([3, 4], 24)  # the first one has nothing at all
        assert two.read() == expected[3:]
        for engine, numbers in ((one, [1]), (two, [2, 3])):
            engine.ask(numbers, 24)
        assert one.read() == [expected[1]]
        assert two.read() == expected[2:4]
        for engine in (one, two):
            print(file=engine.process.stdin, flush=True)
        assert [engine.process.wait(60) for engine in (one, two)] == [0, 0]


@pytest.mark.slow
def test_replicas_that_share_experts_serve_requests_of_their_own(
    checkpoint: Callable[[str], Path],
    redis_url: str,
    key_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, inputs = checkpoint("mixtral"), prompts(LENGTHS)
    expected = [tokens for tokens, _ in expected_outputs(folder, 24)]
    flags = ["--data-parallel-size=2", "--distributed-executor-backend=external_launcher"]
    flags += ["--enable-expert-parallel", "--skip-tokenizer-init", "--num-threads=1"]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    gateways = [Gateway(redis_url, key_prefix, f"r{rank}") for rank in range(2)]
    with ExitStack() as stack:
        processes = []
        for rank, gateway in enumerate(gateways):
            for name, value in {**launched, "RANK": str(rank)}.items():
                monkeypatch.setenv(name, value)
            started = replica(redis_url, key_prefix, folder, *flags, replica_id=gateway.replica_id)
            processes.append(stack.enter_context(started))
        for gateway in gateways:
            gateway.await_state("ready")
        one, two = gateways
        one.request("a", inputs[1], max_tokens=24)
        two.request("b", inputs[4], max_tokens=24)
        for gateway, name, number in ((one, "a", 1), (two, "b", 4)):
            gateway.finish(name)
            assert gateway.tokens(name) == expected[number]
        two.request("c", inputs[3], max_tokens=24)  # the other replica is idle
        two.finish("c")
        assert two.tokens("c") == expected[3]
        events = stack.enter_context(redis.Redis.from_url(redis_url).pubsub())
        events.subscribe(redis_keys.replica_events_channel(key_prefix))
        two.request("d", inputs[3], max_tokens=180)
        two.wait(lambda: bool(two.tokens("d")))
        processes[0].kill()
        assert processes[1].wait(30) == EXIT_PEER_FAULT
        exits = []
        for _ in range(5):  # a subscription's confirmation, and what the replicas said before
            message = events.get_message(ignore_subscribe_messages=True, timeout=1)
            event = decode_replica_event(message["data"]) if message else None
            exits += [event] if event is not None and not event.alive else []
        assert (exits[0].replica_id, exits[0].held) == ("r1", [])


@pytest.mark.parametrize(
    ("blow", "size"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_is_lost_ends_those_that_need_its_experts(
    blow: int, size: int, checkpoint: Callable[[str], Path]
) -> None:
    with two_engines(checkpoint("mixtral"), tensor_parallel_size=size) as (one, two):
        one.ask([0, 1, 2] * 60, 2000)  # some seconds of work on an idle machine
        time.sleep(0.3)
        two.process.send_signal(blow)
        kind, message, seconds = one.read()
        assert kind == "PeerFault"  # none of its own requests is the cause
        assert message.startswith(f"Rank {size} of the experts")
        print(f"noticed after {seconds - 0.3:.2f} s")


@pytest.mark.parametrize(("waited_s", "kind"), [(0.0, EngineFault), (10.5, PeerFault)])
def test_an_engine_that_computes_for_longer_than_the_others_wait_is_the_cause(
    waited_s: float, kind: type[EngineFault]
) -> None:
    group = Mock(spec=RankGroup, size=2, rank=0, waited_s=0.0)
    lockstep = ExpertLockstep(Mock(), group, Mock())
    with lockstep:
        lockstep._began_at -= GATHER_TIMEOUT_S + 0.1
        group.waited_s = waited_s
    lockstep.failure = "Rank 1 of the experts has given no sign of life."
    with pytest.raises(EngineFault) as caught:
        lockstep.check()
    assert type(caught.value) is kind


def test_an_engine_whose_begun_step_never_computes_still_closes() -> None:
    lockstep = ExpertLockstep(Mock(), Mock(spec=RankGroup, size=2, rank=0), Mock())
    lockstep.begin_step()  # and an earlier step fails: this one is skipped
    lockstep.join()
    closing = Thread(target=lockstep.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.parametrize("executor", [ExternalExecutor, MultiprocExecutor])
@pytest.mark.parametrize(
    ("error", "kind"), [(MemoryError("own"), EngineFault), (RankError("others"), PeerFault)]
)
def test_an_engine_whose_own_step_fails_blames_no_other(
    executor: type[ExternalExecutor | MultiprocExecutor],
    error: Exception,
    kind: type[EngineFault],
) -> None:
    lockstep = ExpertLockstep(Mock(), Mock(spec=RankGroup, size=2, rank=0), Mock())
    engine = Mock(spec=executor, worker=Mock(ranks=None), _lockstep=lockstep, _ranks=Mock())
    engine._ranks.watch.failure = ""
    engine.raise_failure = lambda *args: MultiprocExecutor.raise_failure(engine, *args)

    def notice(*_: object) -> None:
        lockstep._fail("A rank of the experts has failed")  # this engine has just ended the group

    engine.worker.fail_ranks.side_effect = notice
    for failed in (error, StepSkipped("an earlier step failed")):
        with pytest.raises(EngineFault) as caught, executor.explain_failure(engine, 3):
            raise failed
        assert type(caught.value) is kind
    with pytest.raises(EngineFault) as caught:  # as the engine resumes
        lockstep.check()
    assert type(caught.value) is kind


def test_a_rank_that_fails_alone_ends_so_that_its_engine_blames_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    process = Mock(_failed_steps=[])
    process.join_forward.side_effect = RankError("others")
    RankProcess._cast(process, "join_forward", ())
    assert (exits, process._loaded.fail_ranks.call_count) == ([], 1)
    process.join_forward.side_effect = MemoryError("own")
    RankProcess._cast(process, "join_forward", ())
    assert exits == [1]


def test_what_cannot_share_experts_is_refused_by_name() -> None:
    launcher: dict[str, Any] = {
        "distributed_executor_backend": "external_launcher",
        "data_parallel_size": 2,
    }
    with pytest.raises(ConfigError, match="an engine is one replica"):
        EngineConfig(model="m", data_parallel_size=2)
    launcher["enable_expert_parallel"] = True
    with pytest.raises(ConfigError, match="for pipeline_parallel_size 1; got 2"):
        EngineConfig(model="m", pipeline_parallel_size=2, **launcher)
    config = EngineConfig(model="m", tensor_parallel_size=2, **launcher)
    environ = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match="must be 2, one per engine that shares experts; got 4"):
        launched_rank(config, environ)
    with pytest.raises(ConfigError, match="enable_eplb can't be used with data_parallel_size"):
        EngineConfig(model="m", tensor_parallel_size=2, enable_eplb=True, **launcher)


@pytest.mark.slow
def test_engines_without_experts_end(model_folder: Callable[[str], Path]) -> None:
    port = free_port()
    settings: dict[str, Any] = {}
    engines = [Engine(model_folder("llama"), rank, port, settings) for rank in range(2)]
    assert [engine.process.wait(60) for engine in engines] == [1, 1]
