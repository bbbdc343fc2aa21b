"""Graphs of the runner, recorded and replayed without a GPU: on stand-ins for CUDA's.

The stand-in notes every torch operation and every launch of a kernel while it records, and does
them again on the same tensors, as a CUDA graph does: what isn't in a static buffer isn't seen.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import kernels
from engine import LLM, LoRARequest, SamplingParams
from engine.devices.cpu import CpuDevice
from engine.sampling.sampler import Sampler
from engine.speculative import drafter
from engine.worker.gpu.graph_dispatcher import (
    BatchDescriptor,
    CUDAGraphDispatcher,
    CUDAGraphMode,
    CUDAGraphRuntimeMode,
)
from engine.worker.gpu.graphs import DeviceForward, PiecewiseAttention
from engine.worker.gpu.input_buffers import StaticInputBuffers
from engine.worker.gpu.model_runner import GpuModelRunner, draft_settings
from engine.worker.gpu.setup import device_forward
from kernels.triton.launch import INTERPRETER, watch
from tests.engine.lora.peft_oracle import PeftOracle, make_adapter
from tests.engine.models import Oracle, make_model
from tests.engine.speculative.free import make_drafts_free
from tests.engine.speculative.seer import Seer
from tests.kernels.triton.sizes import FEW_HEADS

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
        self.num_recorded = 0

    session = contextlib.nullcontext

    def begin(self):
        self.steps = []
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(watch(self.record_launch, INTERPRETER))
        self.stack.enter_context(Noting(self.steps))

    def record_launch(self, kernel, grid, args, options):
        def run():
            with _disable_current_modes():
                kernel[grid](*args, **options)

        run()
        self.steps.append(run)

    def end(self):
        self.stack.close()
        self.num_recorded += 1
        steps = self.steps
        return lambda: [step() for step in steps]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1, **FEW_HEADS)


@pytest.fixture
def graphed(folder, monkeypatch):
    """An engine whose runner goes through graphs of the given mode.

    `adapters`: have slots, that many. `length`: tokens of a sequence whose drafts are checked.
    """

    def make(mode: CUDAGraphMode, sizes=(4, 8), adapters=0, length=1, **settings):
        monkeypatch.setenv(kernels.FORCED, "triton")
        llm = LLM(
            str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=64,
            device="cpu", max_num_seqs=4, **{"max_num_batched_tokens": 16, **settings},
        )  # fmt: skip
        model = llm.core.executor.worker.loaded.model
        slots = None
        if adapters:
            slots = model.make_lora_slots(adapters, 16)
            model.use_lora_slots(slots)
        recorder = NotingRecorder()
        breaks = PiecewiseAttention(model.ops.paged_attention, recorder)
        # The set is this process's only one: the test puts its own method over it.
        monkeypatch.setitem(vars(model.ops), "paged_attention", breaks)
        dispatcher = CUDAGraphDispatcher(mode, list(sizes), 4, length, adapted=slots is not None)
        inputs = StaticInputBuffers(max(sizes), 4, [4], CPU, slots)
        forward = DeviceForward(model.forward, CPU, dispatcher, inputs, breaks, slots)
        count = forward.capture()
        assert count == len(dispatcher.keys)
        llm.core.executor.worker._runner.forward = forward
        return llm, forward, recorder

    return make


def replayed(forward):
    """The keys of recordings, as they are replayed from now on."""
    used = []
    for key, recording in forward._recordings.items():
        recording.steps.insert(0, lambda key=key: used.append(key))
    return used


def test_rows_of_adapters_are_told_apart_by_what_a_graph_reads(graphed, folder, tmp_path):
    """One recording serves any mixture, and steps without adapters have recordings of their own."""
    llm, forward, _ = graphed(
        CUDAGraphMode.FULL_AND_PIECEWISE, adapters=3, skip_tokenizer_init=True
    )
    used = replayed(forward)
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    folders = {
        "wide": make_adapter(folder, tmp_path / "wide", 1, r=12, target_modules=modules),
        "dora": make_adapter(
            folder, tmp_path / "dora", 2, r=5, target_modules=modules, use_dora=True
        ),
    }
    names = ["dora", None, "wide", "dora"]
    texts = [[5, 9, 17], [60], [33, 7, 80, 11, 12], [60]]
    asked = {
        name: LoRARequest(name, index, str(folders[name])) for index, name in enumerate(folders, 1)
    }

    def run_rows(*some):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
        outputs = llm.generate(
            [{"prompt_token_ids": texts[index]} for index in some], params, use_tqdm=False,
            lora_request=[asked.get(names[index]) for index in some],
        )  # fmt: skip
        return [output.outputs[0].token_ids for output in outputs]

    expected = PeftOracle(folder, folders).greedy_all(list(zip(texts, names, strict=True)), 3)
    assert run_rows(0, 1, 2, 3) == expected
    assert run_rows(0, 1, 3) == [expected[0], expected[1], expected[3]]
    assert {key[0] for key in used if key[1].adapted} == {
        CUDAGraphRuntimeMode.FULL,
        CUDAGraphRuntimeMode.PIECEWISE,
    }
    used.clear()
    assert run_rows(1) == expected[1:2]
    assert used
    assert not any(key[1].adapted for key in used)


def test_drafts_are_checked_in_graphs_of_their_own(graphed, folder, monkeypatch):
    """Eight drafts a sequence, as by default: nine tokens, of which some hold and some don't."""
    make_drafts_free(monkeypatch)
    monkeypatch.setitem(drafter.PROPOSERS, "ngram", Seer)
    texts = [[5, 9, 17], [60, 61]]
    oracle = Oracle(folder)
    expected = [oracle.greedy(text, 14) for text in texts]
    Seer.texts = {tuple(t): [output] for t, output in zip(texts, expected, strict=True)}
    Seer.rng = random.Random(7)
    llm, forward, _ = graphed(
        CUDAGraphMode.FULL_DECODE_ONLY, sizes=[18], length=9, max_num_batched_tokens=64,
        speculative_config={"method": "ngram"}, async_scheduling=False,
    )  # fmt: skip
    used = replayed(forward)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    outputs = llm.generate(texts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (CUDAGraphRuntimeMode.FULL, BatchDescriptor(18, 2, True)) in used
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 5


def test_a_draft_model_draws_in_graphs(folder, monkeypatch):
    """Each draft is a whole graph, what it reads between two rounds one of pieces."""
    make_drafts_free(monkeypatch)
    monkeypatch.setenv(kernels.FORCED, "triton")
    ops = kernels.get("cpu")
    for name in ("paged_attention", "mla_attention"):
        monkeypatch.setitem(vars(ops), name, getattr(ops, name))
    monkeypatch.setattr(ops, "attention_backend", "TRITON_ATTN")
    used = {}

    def make_runner(self, parts):
        model, config = parts.loaded.model, replace(self.config, enforce_eager=True)
        if parts.is_draft:
            config = draft_settings(self.config, parts.token_budget)
        forward = device_forward(model, config, 16, [4], NotingRecorder)
        forward.capture()
        used[parts.is_draft] = replayed(forward)
        parts.batch.decodes_first = True
        sampler = Sampler(parts.loaded.eos_token_ids, model.ops)
        return GpuModelRunner(model, parts.batch, sampler, forward, CPU, parts.masks)

    monkeypatch.setattr(CpuDevice, "make_runner", make_runner)
    speculative_config = {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": 2,
    }
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=40, max_model_len=64, device="cpu",
        max_num_seqs=1, max_num_batched_tokens=16, async_scheduling=False,
        cudagraph_capture_sizes=[1, 4], speculative_config=speculative_config,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([[5, 9, 17]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == Oracle(folder).greedy([5, 9, 17], 8)
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 3
    draws = (CUDAGraphRuntimeMode.FULL, BatchDescriptor(1, 1, True))
    assert used[True].count(draws) > 1
    assert {kind for kind, _ in used[True]} == {
        CUDAGraphRuntimeMode.FULL,
        CUDAGraphRuntimeMode.PIECEWISE,
    }


@pytest.mark.parametrize("mode", list(CUDAGraphMode)[1:], ids=lambda mode: mode.name)
def test_every_mode_gives_the_tokens_of_transformers(mode, graphed, folder):
    llm, forward, _ = graphed(mode)
    used = replayed(forward)
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 384) for _ in range(n)] for n in (1, 3, 17)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = Oracle(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 3)
    expected = {mode.decode, mode.mixed} - {CUDAGraphRuntimeMode.NONE}
    assert {key[0] for key in used} == expected
    # One layer: two pieces around an attention, and the note above.
    chunks = [len(r.steps) for (kind, _), r in forward._recordings.items() if kind.name != "FULL"]
    assert all(count == 2 + 1 + 1 for count in chunks)


def test_what_no_graph_holds_runs_eagerly(graphed):
    _, forward, _ = graphed(CUDAGraphMode.FULL_DECODE_ONLY)
    seen = []
    forward._run, run = (lambda *batch: seen.append(batch) or run(*batch)), forward._run
    token_ids, context = StaticInputBuffers(16, 4, [4], CPU).dummy_inputs(
        CUDAGraphDispatcher(CUDAGraphMode.NONE, [], 4).dispatch(9, 1, 9)[1]
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
    dispatcher = CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 4], 4)
    breaks = PiecewiseAttention(lambda *args, **options: args[0], NotingRecorder())

    def run(ids, context):
        during.append(gc.isenabled())
        return ids * 2.0

    forward = DeviceForward(run, CPU, dispatcher, StaticInputBuffers(4, 4, [4], CPU), breaks)
    assert forward.capture() == 6
    assert calls == [True]
    assert during == [False] * 12
    assert gc.isenabled()


def test_graphs_stop_where_memory_does(folder, monkeypatch, caplog):
    monkeypatch.setenv(kernels.FORCED, "triton")
    dispatcher = CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 4], 4)
    breaks = PiecewiseAttention(lambda *args, **options: args[0], NotingRecorder())
    forward = DeviceForward(
        lambda ids, context: ids * 2.0, CPU, dispatcher, StaticInputBuffers(4, 4, [4], CPU), breaks
    )
    budget = itertools.chain([True, True], itertools.repeat(False))
    assert forward.capture(lambda: next(budget)) == 2
    assert {key[1].num_tokens for key in dispatcher.keys} == {4}
    assert "no memory" in caplog.text
