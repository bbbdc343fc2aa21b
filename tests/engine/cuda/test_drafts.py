"""A draft model beside its model on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.checkpoints.safetensors import WeightReader
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices.cpu import CpuDevice
from engine.devices.cuda import CudaDevice, LoraSlotAllocator
from engine.devices.device import CacheRequirements, RunnerInputs
from engine.devices.offload import iter_tensors
from engine.executor.draft_worker import _check_device
from engine.models.decoder import NativeDecoder
from engine.models.registry import decoder_spec, read_config
from engine.quantization.packing import make_quant_scheme
from engine.scheduler import StepPlan
from engine.speculative.heads import load_heads, load_layer_heads
from engine.speculative.heads.base import HeadRounds
from engine.speculative.heads.layer import LayerDraftHeads, TargetModel
from engine.speculative.heads.mtp import Mtp, MtpSource
from engine.worker.draft_head_cache import DraftHeadCache
from engine.worker.gpu.memory import MemoryProfile
from engine.worker.gpu.model_runner import GpuModelRunner, draft_settings, query_len
from engine.worker.input_batch import InputBatch
from tests.engine.cuda.fake_device import FakeDevice, OnDevice
from tests.engine.cuda.meta import META, MetaKernels
from tests.engine.models import VOCAB, make_model
from tests.engine.speculative.eagle_folders import eagle3_parts, eagle_parts
from tests.engine.speculative.free import make_drafts_free
from tests.engine.speculative.head_folders import HIDDEN, medusa_parts, mlp_parts, write
from tests.engine.speculative.mtp_folders import glm_with_drafts

PROMPTS = [[5, 9, 17, 33, 65], [1, 2, 3, 4, 5, 6, 7, 8, 9], [40, 41]]
GIB = 1 << 30


def nearly(folder: Path, to: Path) -> Path:
    """A model that mostly says what that one says."""
    make_model("llama", to)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.001 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def texts(llm: LLM) -> list[list[int]]:
    """Greedy, drawn, and with penalties on what was said."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8, "seed": 4, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **way) for way in ways]
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(asked, params, use_tqdm=False)
    llm.core.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_drafts_of_a_model_on_the_device_change_no_token(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reads, draws and goes back to where a draft failed, by runners of the device alone."""
    monkeypatch.setattr(OnDevice, "strict", False)
    make_drafts_free(monkeypatch, timed=True)
    device, folder = FakeDevice(monkeypatch), model_folder("llama")
    baseline_texts = texts(device.engine(folder, async_scheduling=False))
    calls: list[RunnerInputs] = []

    def make_runner(self: CpuDevice, parts: RunnerInputs) -> GpuModelRunner:
        calls.append(parts)
        return device.runner(parts.loaded, parts.batch, parts.masks)

    monkeypatch.setattr(CpuDevice, "make_runner", make_runner)
    speculative_config = {"method": "draft_model", "model": str(nearly(folder, tmp_path)),
              "num_speculative_tokens": 4}  # fmt: skip
    llm = device.engine(folder, async_scheduling=False, speculative_config=speculative_config)
    assert [parts.is_draft for parts in calls] == [True]
    assert texts(llm) == baseline_texts
    stats = llm.core.stats
    assert stats.spec_decode_num_accepted_tokens_total > 20
    assert stats.spec_decode_num_accepted_tokens_total < stats.spec_decode_num_draft_tokens_total


HEADS: dict[str, Callable[[], Any]] = {"medusa": medusa_parts, "mlp_speculator": mlp_parts}
LAYERS: dict[str, Callable[[], Any]] = {"eagle": eagle_parts, "eagle3": eagle3_parts}


@pytest.mark.parametrize("method", {**HEADS, **LAYERS})
def test_drafts_of_heads_on_the_device_change_no_token(
    method: str,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Random heads are mostly wrong; two likely tokens are often drafted all the same."""
    monkeypatch.setattr(OnDevice, "strict", False)
    make_drafts_free(monkeypatch, timed=True)
    device, folder = FakeDevice(monkeypatch), model_folder("llama")

    def make_runner(self: CpuDevice, parts: RunnerInputs) -> GpuModelRunner:
        return device.runner(parts.loaded, parts.batch, parts.masks, hidden=parts.hidden)

    monkeypatch.setattr(CpuDevice, "make_runner", make_runner)
    config = {"method": method, "model": str(write(tmp_path, *{**HEADS, **LAYERS}[method]())),
              "num_speculative_tokens": 3}  # fmt: skip
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, logit_bias={5: 70.0, 6: 68.0}
    )
    token_ids = []
    for speculative_config in (None, config):
        llm = LLM(
            str(folder), dtype="float32", cpu_kernels=False, num_gpu_blocks_override=64,
            max_model_len=128, async_scheduling=False, speculative_config=speculative_config,
        )  # fmt: skip
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        token_ids.append([output.outputs[0].token_ids for output in outputs])
    assert token_ids[0] == token_ids[1]
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 5


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_stay_on_the_device(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parts = medusa_parts("truncated") if method == "medusa" else mlp_parts()
    folder = write(tmp_path, *parts)
    heads = load_heads(method, folder, (HIDDEN, VOCAB), MetaKernels(), dtype)
    rounds = HeadRounds(heads, torch.zeros(3, HIDDEN, device=META))
    for rows in (3, 2):
        logits = rounds.logits(torch.zeros(rows, dtype=torch.int64, device=META))
        assert (logits.shape, logits.dtype, logits.device) == ((rows, VOCAB), torch.float32, META)
        rounds.keep([0, 1])


@pytest.mark.parametrize("method", [*LAYERS, "mtp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_for_drafts_stay_on_the_device(
    method: str, dtype: torch.dtype, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two steps of two sequences, one of which begins behind a block of somebody else's; a round of
    both, and one row of it goes on.
    """
    folder = glm_with_drafts(tmp_path) if method == "mtp" else model_folder("llama")
    ops = MetaKernels()
    model = NativeDecoder(decoder_spec(read_config(folder)), ops, dtype, 64)
    weights = WeightReader(folder)
    model.load(weights, lambda done, total: None)
    target = TargetModel(model, 64)
    heads: LayerDraftHeads
    if method == "mtp":
        scheme = make_quant_scheme(None, False)
        heads = Mtp(MtpSource(folder, read_config(folder), weights, dtype, scheme), target)
    else:
        head_folder = write(tmp_path, *LAYERS[method]())
        heads = load_layer_heads(method, head_folder, target, ops, dtype)
    model.allocate_kv(8, 4, dtype)
    batch = InputBatch(2, 64, 4)
    memory = DraftHeadCache(heads, batch, 0, 8, dtype, 3, META, dtype)
    assert all(tensor.device == META for tensor in iter_tensors(heads))
    batch.row_of.update({7: 0, 9: 1})
    memory._tracked_rows = {0, 1}
    plan = StepPlan(step=0, seq_ids=[7, 9])
    for owner, indexes in (([0, 0, 0, 0, 0, 1], [0, 1, 2, 3, 4, 4]), ([0, 1], [5, 5])):
        rows, positions = np.array(owner), np.array(indexes)
        batch.num_computed[[0, 1]] = positions.max() + 1
        memory._follow(plan, rows, positions, torch.empty(len(rows), heads.columns, device=META))
    batch.num_tokens[[0, 1]] = 7
    assert [memory.row_of(seq_id) for seq_id in (7, 9)] == [0, 1]
    # In the weights' own numbers all the way.
    mixed = heads.combine_inputs(torch.zeros(2, dtype=torch.int64, device=META), memory._states[:2])
    assert {memory._block_end_states.dtype, *(tensor.dtype for tensor in mixed)} == {dtype}
    rounds = memory.start_draft_rounds([0, 1])
    for count in (2, 1):
        logits = rounds.logits(torch.zeros(count, dtype=torch.int64, device=META))
        vocab = model.spec.vocab_size
        assert (logits.shape, logits.dtype, logits.device) == ((count, vocab), torch.float32, META)
        assert rounds._states.dtype == dtype
        rounds.keep([0])
    memory.warm_up(3)
    memory.warm_up(100)


def test_a_gpu_leaves_a_draft_model_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger of the two steps, the graphs of both, a draft's part of each block, and a sequence
    of full length.
    """
    device = CudaDevice.__new__(CudaDevice)
    device.config = EngineConfig(model="m", block_size=16, gpu_memory_utilization=0.5)
    device._adapters = LoraSlotAllocator(device.config)
    profiled: list[bool] = []

    def profile(need: CacheRequirements, *, is_draft: bool = False) -> MemoryProfile:
        profiled.append(is_draft)
        if is_draft:
            return MemoryProfile(total=80 * GIB, other=0, peak=31 * GIB, graphs=GIB)
        return MemoryProfile(total=80 * GIB, other=0, peak=28 * GIB, graphs=2 * GIB)

    monkeypatch.setattr(device, "_profile", profile)

    class Layout:
        groups, state_group = (0,), None

    def need(per_token: int, draft: CacheRequirements | None = None) -> CacheRequirements:
        longest, loaded = GIB // (16 << 16), SimpleNamespace(spec=None)
        return CacheRequirements(loaded, torch.bfloat16, Layout(), per_token, longest, 1, draft)  # type: ignore[arg-type]

    isolated = device.num_blocks(need(1 << 18))
    assert isolated == 10 * GIB // (16 << 18)
    small, wide = (
        device.num_blocks(need(1 << 18, need(head_bytes))) for head_bytes in (1 << 15, 1 << 18)
    )
    assert device._graph_bytes == {False: 2 * GIB, True: GIB}
    assert small == (6 * GIB - GIB // 2) // (16 * ((1 << 18) + (1 << 15)))
    assert wide == (6 * GIB - 4 * GIB) // (16 * ((1 << 18) + (1 << 16)))
    assert profiled == [False, False, True, False, True]


def test_a_draft_model_has_the_sizes_that_it_can_run() -> None:
    """It checks no drafts; sizes beyond its budget are the model's alone."""
    speculative_config = {"method": "draft_model", "model": "d", "num_speculative_tokens": 4}
    config = EngineConfig(model="m", async_scheduling=False, speculative_config=speculative_config)
    assert query_len(config) == 5
    assert query_len(draft_settings(config, 2048)) == 1
    for sizes, expected_sizes, eager in (
        (None, None, False), ([8, 4096], [8], False), ([4096], None, True),
    ):  # fmt: skip
        draft_config = draft_settings(replace(config, cudagraph_capture_sizes=sizes), 2048)
        assert (draft_config.cudagraph_capture_sizes, draft_config.enforce_eager) == (
            expected_sizes,
            eager,
        )


def test_heads_are_refused_by_name(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes all there are; a device of somebody else's those that it names."""
    monkeypatch.setattr(CpuDevice, "draft_head_methods", CudaDevice.draft_head_methods)
    device = CpuDevice(EngineConfig(model=str(model_folder("llama"))))
    for method in ("draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "mtp"):
        _check_device(device, method)
    monkeypatch.setattr(CpuDevice, "draft_head_methods", ("medusa", "mlp_speculator"))
    text = r"by eagle3 aren't supported .* suffix, draft_model, medusa and mlp_speculator are"
    with pytest.raises(ConfigError, match=text):
        _check_device(device, "eagle3")
    monkeypatch.setattr(CpuDevice, "runs_draft_models", False)
    monkeypatch.setattr(CpuDevice, "draft_head_methods", ())
    with pytest.raises(ConfigError, match=r"by draft_model aren't .* ngram and suffix are"):
        _check_device(device, "draft_model")
