"""Graphs of the runner, recorded and replayed without a GPU: on stand-ins for CUDA's.

The stand-in notes every torch operation and every launch of a kernel while it records, and does
them again on the same tensors, as a CUDA graph does: what isn't in a static buffer isn't seen.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import kernels
from engine import LLM, SamplingParams
from engine.worker.cuda.dispatcher import Dispatcher
from engine.worker.cuda.forward import DeviceForward
from engine.worker.cuda.graphs import AttentionBreaks
from engine.worker.cuda.inputs import StaticInputs
from engine.worker.cuda.modes import GraphMode, RuntimeMode
from kernels.triton.launch import INTERPRETER, watch
from tests.engine.models import Oracle, make_model

CPU = torch.device("cpu")


def storages(values):
    flat = torch.utils._pytree.tree_leaves(values)
    return {x.untyped_storage().data_ptr() for x in flat if isinstance(x, torch.Tensor)}


class Noting(TorchDispatchMode):
    """Notes operations that make or change data; views need no doing again."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        elif (
            isinstance(out, torch.Tensor)
            and "empty" not in str(func)
            and not storages(out) & storages((args, kwargs))
        ):
            self.steps.append(lambda: out.copy_(func(*args, **kwargs)))
        return out


class NotingRecorder:
    """`Recorder` on the CPU."""

    def __init__(self):
        self.pieces = 0

    session = contextlib.nullcontext

    def begin(self):
        self.steps = []
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(watch(self.note, INTERPRETER))
        self.stack.enter_context(Noting(self.steps))

    def note(self, kernel, grid, args, options):
        def run():
            with _disable_current_modes():
                kernel[grid](*args, **options)

        run()
        self.steps.append(run)

    def end(self):
        self.stack.close()
        self.pieces += 1
        steps = self.steps
        return lambda: [step() for step in steps]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture
def graphed(folder, monkeypatch):
    """An engine whose runner goes through graphs of the given mode."""

    def make(mode: GraphMode):
        monkeypatch.setenv(kernels.FORCED, "triton")
        llm = LLM(
            str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=64,
            device="cpu", max_num_batched_tokens=16, max_num_seqs=4,
        )  # fmt: skip
        model = llm.core.executor.loaded.model
        recorder = NotingRecorder()
        breaks = AttentionBreaks(model.ops.paged_attention, recorder)
        # The set is this process's only one: the test puts its own method over it.
        monkeypatch.setitem(vars(model.ops), "paged_attention", breaks)
        dispatcher = Dispatcher(mode, [2, 4, 8], 4)
        forward = DeviceForward(
            model.forward, CPU, dispatcher, StaticInputs(8, 4, 4, 1, CPU), breaks
        )
        count = forward.capture()
        assert count == len(dispatcher.keys)
        llm.core.executor._runner.forward = forward
        return llm, forward, recorder

    return make


@pytest.mark.parametrize("mode", list(GraphMode)[1:], ids=lambda mode: mode.name)
def test_every_mode_gives_the_tokens_of_transformers(mode, graphed, folder):
    llm, forward, _ = graphed(mode)
    used = set()
    for key, recording in forward._recordings.items():
        recording.steps.insert(0, lambda key=key: used.add(key[0]))
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 384) for _ in range(n)] for n in (1, 3, 17)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = Oracle(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 3)
    expected = {mode.decode, mode.mixed} - {RuntimeMode.NONE}
    assert used == expected
    # One layer: two pieces around an attention, and the note above.
    pieces = [len(r.steps) for (kind, _), r in forward._recordings.items() if kind.name != "FULL"]
    assert all(count == 2 + 1 + 1 for count in pieces)


def test_what_no_graph_holds_runs_eagerly(graphed):
    _, forward, _ = graphed(GraphMode.FULL_DECODE_ONLY)
    seen = []
    forward._run, run = (lambda *batch: seen.append(batch) or run(*batch)), forward._run
    token_ids, context = StaticInputs(16, 4, 4, 1, CPU).rehearse(
        Dispatcher(GraphMode.NONE, [], 4).dispatch(9, 1, 9)[1]
    )
    context.query_start_loc = torch.tensor([0, 9], dtype=torch.int32)
    context.seq_lens = torch.tensor([9], dtype=torch.int32)
    assert forward(token_ids, context).shape == (9, 64)
    assert len(seen) == 1


def test_garbage_is_collected_once_for_all_graphs(monkeypatch):
    """Once a graph, 86 of them took up to a minute; and none is collected while one is recorded."""
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(gc.isenabled()))
    during = []
    dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, [1, 2, 4], 4)
    breaks = AttentionBreaks(lambda *args, **options: args[0], NotingRecorder())

    def run(ids, context):
        during.append(gc.isenabled())
        return ids * 2.0

    forward = DeviceForward(run, CPU, dispatcher, StaticInputs(4, 4, 4, 1, CPU), breaks)
    assert forward.capture() == 6
    assert calls == [True]
    assert during == [False] * 12
    assert gc.isenabled()


def test_graphs_stop_where_memory_does(folder, monkeypatch, caplog):
    monkeypatch.setenv(kernels.FORCED, "triton")
    dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, [1, 2, 4], 4)
    breaks = AttentionBreaks(lambda *args, **options: args[0], NotingRecorder())
    forward = DeviceForward(
        lambda ids, context: ids * 2.0, CPU, dispatcher, StaticInputs(4, 4, 4, 1, CPU), breaks
    )
    room = itertools.chain([True, True], itertools.repeat(False))
    assert forward.capture(lambda: next(room)) == 2
    assert {key[1].num_tokens for key in dispatcher.keys} == {4}
    assert "no memory" in caplog.text
