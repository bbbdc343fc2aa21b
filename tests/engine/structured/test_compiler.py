"""Grammars that would take forever, too much, or come in thousands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineOverloaded, InvalidRequest
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore
from engine.offline.llm import LLM
from engine.structured_output import compile_pool as jobs
from engine.structured_output.backend_llguidance import BadGrammar, Vocabulary
from engine.structured_output.compile_pool import (
    CompileJob,
    CompilePool,
    CompileQueue,
    CompileResult,
    CompileWorker,
    Limits,
    WorkerFailed,
)
from engine.structured_output.grammar import CompiledGrammar
from engine.structured_output.grammar_spec import GrammarSpec, make_grammar_spec
from engine.structured_output.vocabulary import GrammarCache
from tests.engine.structured.conftest import PROMPT, SETTINGS, finish, params, request, tokens

Folder = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[3]
HANGING = (sys.executable, "-m", "tests.engine.structured.hanging_worker")


def spec(**fields: Any) -> GrammarSpec:
    return make_grammar_spec(StructuredOutputsParams(**fields))


def exponential(levels: int) -> dict[str, Any]:
    """A schema whose alternatives multiply at each level: three take the backend half a second."""
    leaf = [{"type": "object", "properties": {name: {"const": 1}}} for name in "ab"]
    defs: dict[str, Any] = {"x0": {"anyOf": leaf}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/x{level - 1}"}
        constant = {"type": "object", "properties": {f"c{level}": {"const": 1}}}
        defs[f"x{level}"] = {"allOf": [below, {"anyOf": [below, constant]}]}
    return {"$defs": defs, "$ref": f"#/$defs/x{levels}"}


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Iterator[Callable[..., CompilePool]]:
    pools: list[CompilePool] = []

    def make(**settings: Any) -> CompilePool:
        pools.append(CompilePool(vocabulary, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert all(process._process is None for process in pool.processes)


def outcome(compiler: CompilePool, job: CompileJob, timeout_s: float = 60.0) -> CompileResult:
    compiler.line.wait([job], timeout_s)
    assert job.outcome is not None
    return job.outcome


# -- one worker -----------------------------------------------------------------------------------


@pytest.mark.system
def test_it_starts_without_what_is_slow_to_import() -> None:
    probe = (
        "import sys, engine.structured_output.compile_worker;"
        " print({'numpy', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.system
def test_fault_12_a_grammar_over_the_time_limit_kills_its_worker(vocabulary: Vocabulary) -> None:
    process = CompileWorker(vocabulary, Limits(time_s=0.05))
    try:
        with pytest.raises(BadGrammar, match=r"more than 0\.05 s"):
            process.compile(spec(json=exponential(3)).data)
        assert process.num_kills == 1
        process._limits = Limits(time_s=30)
        assert process.compile(spec(regex="ab").data)[0]
        assert process.num_kills == 1
    finally:
        process.close()
        process.reap()


@pytest.mark.system
def test_fault_12_a_grammar_over_the_memory_limit_ends_its_worker_alone(
    vocabulary: Vocabulary,
) -> None:
    limits = Limits(time_s=60, memory_bytes=16 * 2**20)
    process = CompileWorker(vocabulary, limits)
    try:
        with pytest.raises(BadGrammar, match="16 MiB"):
            process.compile(spec(json=exponential(3)).data)
        assert process.num_kills == 0
        assert process.compile(spec(regex="ab").data)[0]
    finally:
        process.close()
        process.reap()


@pytest.mark.system
@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": "[]"},
        {"grammar": 'start: "a" missing'},
        {"grammar": "root ::= ("},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
        {"json": exponential(20)},
        {"json": {}, "whitespace_pattern": "("},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_fault_12_and_39_bad_and_exploding_grammars_are_refused_with_a_reason(
    fields: dict[str, Any], shared: CompilePool
) -> None:
    reason = outcome(shared, shared.submit(spec(**fields), "t"))
    assert isinstance(reason, str)
    assert 0 < len(reason) <= 500
    assert "<state>" not in reason


@pytest.fixture(scope="module")
def shared(vocabulary: Vocabulary) -> Iterator[CompilePool]:
    compile_pool = CompilePool(vocabulary)
    yield compile_pool
    compile_pool.close()


@pytest.mark.system
def test_a_worker_that_cannot_start_is_an_error_not_a_hang(
    compiler: Callable[..., CompilePool], vocabulary: Vocabulary
) -> None:
    broken = compiler(command=("/nonexistent/worker",))
    assert "compile worker" in str(outcome(broken, broken.submit(spec(regex="a"), "t")))
    process = CompileWorker(Vocabulary("{}", 384, (2,)), Limits())
    with pytest.raises(WorkerFailed):
        process.compile(spec(regex="a").data)
    process.close()
    process.reap()


@pytest.mark.system
def test_a_worker_that_failed_once_is_no_fault_of_the_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = params(regex="[a-f]{3}")

    def no_memory(*_: object) -> None:
        raise WorkerFailed("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(CompileWorker, "compile", no_memory)
        llm.core.add_request(request(asked))
        (deltas,) = finish(llm.core).values()
    assert deltas[-1].error is not None
    assert (deltas[-1].error.status, deltas[-1].error.code) == (500, "engine_fault")
    llm.core.add_request(request(asked))
    (deltas,) = finish(llm.core).values()
    assert deltas[-1].finish_reason == "stop"


# -- several at once ------------------------------------------------------------------------------


@pytest.mark.system
def test_fault_34_a_hostile_grammar_beside_a_good_one_harms_nothing(
    compiler: Callable[..., CompilePool],
) -> None:
    pool = compiler(limits=Limits(time_s=2.0), command=HANGING)
    bad = [pool.submit(spec(regex=f"hang{n}"), "mallory") for n in range(2)]
    dying = pool.submit(spec(regex="die"), "mallory")
    good = [pool.submit(spec(regex=f"ok{n}"), "alice") for n in range(3)]
    for job in good:
        assert isinstance(outcome(pool, job), CompiledGrammar)
    # Mallory holds one of two workers, so none of hers but the first can have ended before.
    assert sum(job.outcome is not None for job in bad) <= 1
    for job in (*bad, dying):
        assert "more than 2 s" in str(outcome(pool, job))
    assert isinstance(outcome(pool, pool.submit(spec(regex="ok"), "mallory")), CompiledGrammar)


@pytest.mark.system
def test_fault_12_the_engine_runs_on_while_a_hostile_grammar_compiles(
    model_folder: Folder, llm: LLM
) -> None:
    core = EngineCore(EngineConfig(model=str(model_folder("llama")), **SETTINGS))
    compiler = CompilePool(core.structured._vocabulary(), Limits(time_s=1.5), command=HANGING)
    core.structured._compiler = compiler
    try:
        core.add_request(request(params(regex="hang"), "hostile", tenant="mallory"))
        baseline_params = params(3, max_tokens=8, ignore_eos=True)
        core.add_request(request(baseline_params, "plain", tenant="alice"))
        core.add_request(request(params(regex="ok[ab]{3}"), "bound", tenant="alice"))
        assert core.snapshot().num_requests_waiting == 3
        order = []
        while core.has_work:
            order += [delta for delta in core.step() if delta.finish_reason]
    finally:
        compiler.close()
    assert [delta.request_id for delta in order][-1] == "hostile"
    assert {delta.finish_reason for delta in order[:-1]} == {"stop", "length"}
    error = order[-1].error
    assert error is not None
    assert (error.status, error.error_type) == (400, "invalid_request_error")
    assert (error.param, error.code) == ("structured_outputs", "invalid_grammar")
    # It is known now: refused before anything is queued.
    with pytest.raises(InvalidRequest, match=r"more than 1\.5 s"):
        core.add_request(request(params(regex="hang"), "again", tenant="mallory"))
    assert not core.requests


def test_fault_12_the_classic_is_harmless_here(llm: LLM) -> None:
    output = llm.generate([PROMPT], params(regex="(a+)+b", max_tokens=40), use_tqdm=False)[0]
    assert re.fullmatch("a+b?", output.outputs[0].text)


@pytest.mark.system
def test_a_grammar_that_grows_too_complex_on_the_way_ends_its_own_output_only(
    model_folder: Folder,
) -> None:
    core = EngineCore(EngineConfig(model=str(model_folder("llama")), **SETTINGS))
    growing = "".join(f"(a?b?){{{count}}}" for count in range(1, 200))
    core.add_request(request(params(regex=growing, min_tokens=30), "growing"))
    core.add_request(request(params(regex="[ab]{20}"), "steady"))
    outputs = finish(core)
    error = outputs["growing", 0][-1].error
    assert error is not None
    assert (error.status, error.param) == (400, "structured_outputs")
    assert error.code == "grammar_too_complex"
    assert outputs["steady", 0][-1].finish_reason == "stop"


@pytest.mark.system
def test_a_bad_grammar_gives_every_output_its_error(model_folder: Folder) -> None:
    core = EngineCore(EngineConfig(model=str(model_folder("llama")), **SETTINGS))
    core.add_request(request(params(regex="(a", n=3), "r"))
    outputs = finish(core)
    assert {key: [d.error is not None for d in deltas] for key, deltas in outputs.items()} == {
        ("r", index): [True] for index in range(3)
    }
    assert core.stats.requests_finished_total == {"error": 3}
    assert not core.requests


@pytest.mark.system
def test_requests_for_one_grammar_share_its_compilation(model_folder: Folder) -> None:
    core = EngineCore(EngineConfig(model=str(model_folder("llama")), **SETTINGS))
    for number in range(4):
        message = request(params(1, regex="[ab]{4}"), f"r{number}", tenant=f"t{number % 2}")
        core.add_request(message)
    compiler = core.structured._compiler
    assert compiler is not None
    assert len(compiler.line) <= 1
    outputs = {tuple(tokens(deltas)) for deltas in finish(core).values()}
    assert len(outputs) == 1
    assert len(core.structured.cache) == 1


# -- the line and the cache -----------------------------------------------------------------------


def test_a_tenants_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_PENDING_PER_TENANT", 3)
    line = CompileQueue(num_workers=2)
    allocated_responses = [line.put(spec(regex=f"a{n}"), "mallory") for n in range(3)]
    with pytest.raises(EngineOverloaded):
        line.put(spec(regex="b"), "mallory")
    assert line.put(spec(regex="a0"), "mallory") is allocated_responses[0]
    assert line.put(spec(regex="b"), "alice") not in allocated_responses
    line.leave(allocated_responses[0])
    with pytest.raises(EngineOverloaded):
        line.put(spec(regex="c"), "mallory")
    line.leave(allocated_responses[0])
    line.put(spec(regex="c"), "mallory")


def test_the_line_is_fair_between_tenants() -> None:
    line = CompileQueue(num_workers=3)
    for number in range(5):
        line.put(spec(regex=f"m{number}"), "mallory")
    first, second = line.pop(), line.pop()
    assert first is not None
    assert second is not None
    # Mallory has her two; the third worker is for others.
    line.put(spec(regex="a0"), "alice")
    line.put(spec(regex="m4"), "alice")
    third = line.pop()
    assert third is not None
    assert third.charged_to == "alice"
    line.finish(third, "done")
    fourth = line.pop()
    assert fourth is not None
    assert (fourth.charged_to, fourth.tenants) == ("alice", {"alice", "mallory"})
    line.finish(fourth, "done")
    line.finish(first, "done")
    fifth = line.pop()
    assert fifth is not None
    assert fifth.charged_to == "mallory"
    waiter = threading.Thread(target=line.pop)
    waiter.start()
    line.close()
    waiter.join(60)
    assert not waiter.is_alive()


def test_fault_13_ten_thousand_grammars_stay_bounded() -> None:
    cache = GrammarCache(max_entries=100, max_bytes=10**6)
    for number in range(10_000):
        key = number.to_bytes(4, "little")
        grammar = CompiledGrammar(None, number % 50_000)  # type: ignore[arg-type]
        cache.put(key, "a reason" if number % 3 else grammar)
        assert len(cache) <= 100
        assert cache.num_bytes <= 10**6
    assert cache.get((9_999).to_bytes(4, "little")) is not None
    assert cache.get((5).to_bytes(4, "little")) is None
    cache.put(b"large", CompiledGrammar(None, 10**7))  # type: ignore[arg-type]
    assert cache.get(b"large") is None


def test_the_grammar_used_last_stays_longest() -> None:
    cache = GrammarCache(max_entries=2)
    cache.put(b"a", "x")
    cache.put(b"b", "y")
    cache.get(b"a")
    cache.put(b"c", "z")
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == ("x", None, "z")
    assert (cache.num_hits, cache.num_queries) == (3, 4)
