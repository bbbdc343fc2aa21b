"""What serving compiles after the warm-up, counted on a device that holds nothing.

Arguments are folders of models, each with a quantization behind it ("" for none); each has a line
of JSON. Where a folder has another one "heads", that holds EAGLE's for its model.

Run by `test_compilations.py` in a process of its own, where kernels aren't the interpreter's:
launches are watched, and what Triton would compile each for is asked of Triton itself.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.checkpoints.safetensors import WeightReader
from engine.contract.engine_config import EngineConfig
from engine.devices.cuda import CudaDevice
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata
from engine.models.lora import NO_ADAPTERS, DeviceHeads
from engine.models.registry import decoder_spec, read_config
from engine.speculative.heads import load_layer_heads
from engine.speculative.heads.layer import TargetModel as HeadTarget
from engine.worker.draft_head_cache import DraftHeadCache, LayerDraftRounds, PendingTokens
from engine.worker.gpu.graphs import PiecewiseAttention
from engine.worker.gpu.input_buffers import stage_inputs
from engine.worker.gpu.setup import _no_rows, warm_up_draft_heads, warm_up_kernels
from engine.worker.input_batch import InputBatch
from kernels.triton import TritonKernels
from kernels.triton.launch import Target, watch
from tools.triton.compiler import specialisation

META = torch.device("meta")
HOPPER = Target(90, 132)
BLOCK, LONGEST = 16, 8448
BUDGET, SEQUENCES = CudaDevice.token_budget, EngineConfig(model="").max_num_seqs
"""By default."""


def batch(sequences: list[tuple[int, int]]) -> tuple[torch.Tensor, AttentionMetadata]:
    """A step of sequences given as (tokens of the step, length); decodes come first."""
    counts = [count for count, _ in sequences]
    lengths = [length for _, length in sequences]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = int(starts[-1])
    decodes = sum(count == 1 for count in counts)
    context = AttentionMetadata(
        positions=torch.arange(tokens),
        slot_mapping=torch.arange(tokens),
        block_tables=torch.zeros(len(counts), -(-max(lengths) // BLOCK), dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=starts,
        logits_rows=starts[1:].long() - 1,
    )
    if 0 < decodes < len(counts):
        context.num_decodes = sum(counts[:decodes])
        context.prefill_start_loc = starts[decodes:] - starts[decodes]
    return torch.zeros(tokens, dtype=torch.int64), context


def serving(drafts: int) -> Iterator[list[tuple[int, int]]]:
    """A chat that grows to 8,200 tokens, alone and beside others that come and go; at last
    sequences of up to so many drafts.
    """
    rng = random.Random(5)
    for length in (*range(1, 66), *range(66, 8200, 331), 8191, 8192, 8193, 8200):
        yield [(1, length)]
    for _ in range(60):
        decodes = [(1, rng.randint(1, 8200)) for _ in range(rng.randrange(SEQUENCES // 2))]
        prompts = [
            (count, count + rng.choice((0, 0, rng.randrange(6000))))
            for count in (rng.randint(2, 400) for _ in range(rng.randrange(4)))
        ]
        if decodes or prompts:
            yield decodes + prompts
    for count in (2, 3, 63, 255, 1000, 1001, 5000, BUDGET):
        yield [(count, count)]
    for _ in range(15):
        counts = [rng.randint(1, 1 + drafts) for _ in range(rng.randint(1, SEQUENCES))]
        yield [(count, 300 + count) for count in sorted(counts)]


def choose(ops: TritonKernels, logits: torch.Tensor) -> None:
    """Tokens of the rows, by all that a request may ask for."""
    rows, vocab = logits.shape

    def all_of(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=META)

    half = all_of(0.5, torch.float64)
    ops.argmax(logits)
    ops.sample(logits, all_of(1.0, torch.float32), all_of(vocab, torch.int64), half, half, half)
    ops.edits.token_logprobs(logits, all_of(0, torch.int64))


def heads_of(folder: Path, model: NativeDecoder, ops: TritonKernels) -> DraftHeadCache | None:
    """What an EAGLE head keeps beside the model, if there is one."""
    if not (folder / "heads").is_dir():
        return None
    target = HeadTarget(model, LONGEST)
    heads = load_layer_heads("eagle", folder / "heads", target, ops, torch.bfloat16, "int4")
    batch = InputBatch(SEQUENCES, LONGEST, BLOCK)
    return DraftHeadCache(heads, batch, 0, 4, torch.bfloat16, 4, META, torch.bfloat16)


def draft(memory: DraftHeadCache) -> None:
    """Rounds of any number of rows, after any number of tokens."""
    rng = random.Random(7)
    for count in (1, 2, 3, 16, 17, 100, SEQUENCES):
        computed = np.array([rng.randint(1, 8200) for _ in range(count)])
        tables = np.zeros((count, -(-LONGEST // BLOCK)), dtype=np.int32)
        states = torch.zeros(count, memory.heads.width, dtype=torch.bfloat16, device=META)
        rounds = LayerDraftRounds(memory, tables, computed, states)
        for _ in range(2):
            rounds.logits(torch.zeros(count, dtype=torch.int64, device=META))
    for count in (1, 5, 300, 1000, 8191):
        numbers = np.arange(1, count + 1)
        hidden = torch.zeros(count, memory.heads.columns, dtype=torch.bfloat16, device=META)
        memory._pending.append(PendingTokens(hidden, numbers - 1, numbers, numbers, numbers))
        memory.process_pending()


def main(folder: Path, quantization: str | None) -> None:
    """Print how many binaries the warm-up takes, and which serving takes besides."""
    seen: set[Any] = set()

    def record_compilation(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        seen.add(specialisation(kernel, args, options, HOPPER.capability))

    ops = TritonKernels(META, "a test")
    breaks = PiecewiseAttention(ops.paged_attention, latent_attention=ops.mla_attention)
    breaks.install(ops)
    model = NativeDecoder(
        decoder_spec(read_config(folder)), ops, torch.bfloat16, LONGEST, quantization
    )
    drafts = 0 if quantization else 8
    drafting: dict[str, Any] = {"speculative_config": {"method": "ngram"}} if drafts else {}
    config = EngineConfig(
        model=str(folder), block_size=BLOCK, max_num_seqs=SEQUENCES, async_scheduling=False,
        **drafting,
    )  # fmt: skip
    with watch(record_compilation, HOPPER), torch.inference_mode():
        model.load(WeightReader(folder), lambda done, total: None)
        model.allocate_kv(4, BLOCK, torch.bfloat16)
        slots = model.make_lora_slots(8, 16)
        assert slots is not None
        model.use_lora_slots(slots)
        warm_up_kernels(model, config, BUDGET, [LONGEST // BLOCK], model.spec.vocab_size)
        if (memory := heads_of(folder, model, ops)) is not None:
            warm_up_draft_heads(memory, BUDGET)
        warm = set(seen)
        for number, sequences in enumerate(serving(drafts)):
            ids, context = batch(sequences)
            # Every third step has adapters.
            rows = slots.sort([(0, np.arange(len(ids)))], len(ids), padded=False)
            staged = stage_inputs(ids, context, META, lora=() if number % 3 else rows)
            breaks.batch = staged.context
            hidden = model.forward(staged.token_ids, staged.context)
            count = len(context.seq_lens)
            heads = DeviceHeads(rows=_no_rows(slots, count, META))
            choose(ops, model.logits(hidden, NO_ADAPTERS if number % 3 else heads))
        if memory is not None:
            draft(memory)
    later = [key[0] for key in seen - warm]
    print(json.dumps({"warm": len(warm), "later": sorted(later)}))


if __name__ == "__main__":
    for folder, quantization in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(Path(folder), quantization or None)
