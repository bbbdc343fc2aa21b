"""What serving compiles after the warm-up, counted on a device that holds nothing.

Arguments are folders of models, each with a quantization behind it ("" for none); each has a line
of JSON.

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

from engine.contract.config import EngineConfig
from engine.models.adapters import DeviceHeads
from engine.models.architectures import decoder_spec, read_config
from engine.models.context import AttentionContext
from engine.models.decoder import NativeDecoder
from engine.models.weights import WeightReader
from engine.worker.cuda.graphs import AttentionBreaks
from engine.worker.cuda.inputs import stage
from engine.worker.cuda.warm import _choose, _no_rows, warm_up_kernels
from kernels.triton import TritonKernels
from kernels.triton.compiler import specialisation
from kernels.triton.launch import Target, watch

META = torch.device("meta")
HOPPER = Target(90, 132)
BLOCK, LONGEST, BUDGET, SEQUENCES = 16, 8448, 2048, 64


def batch(sequences: list[tuple[int, int]]) -> tuple[torch.Tensor, AttentionContext]:
    """A step of sequences given as (tokens of the step, length); decodes come first."""
    counts = [count for count, _ in sequences]
    lengths = [length for _, length in sequences]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = int(starts[-1])
    decodes = sum(count == 1 for count in counts)
    context = AttentionContext(
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
    for length in (*range(1, 200), *range(200, 8200, 97), 8191, 8192, 8193, 8200):
        yield [(1, length)]
    for _ in range(150):
        decodes = [(1, rng.randint(1, 8200)) for _ in range(rng.randrange(SEQUENCES // 2))]
        prompts = [
            (count, count + rng.choice((0, 0, rng.randrange(6000))))
            for count in (rng.randint(2, 400) for _ in range(rng.randrange(4)))
        ]
        if decodes or prompts:
            yield decodes + prompts
    for count in (2, 3, 63, 255, 1000, 1001, BUDGET):
        yield [(count, count)]
    for _ in range(30):
        counts = [rng.randint(1, 1 + drafts) for _ in range(rng.randint(1, SEQUENCES))]
        yield [(count, 300 + count) for count in sorted(counts)]


def main(folder: Path, quantization: str | None) -> None:
    """Print how many binaries the warm-up takes, and which serving takes besides."""
    seen: set[Any] = set()

    def note(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        seen.add(specialisation(kernel, args, options, HOPPER.capability))

    ops = TritonKernels(META, "a test")
    breaks = AttentionBreaks(ops.paged_attention)
    vars(ops)["paged_attention"] = breaks
    model = NativeDecoder(
        decoder_spec(read_config(folder)), ops, torch.bfloat16, LONGEST, quantization
    )
    drafts = 0 if quantization else 8
    drafting: dict[str, Any] = {"speculative_config": {"method": "ngram"}} if drafts else {}
    config = EngineConfig(
        model=str(folder), block_size=BLOCK, max_num_seqs=SEQUENCES, async_scheduling=False,
        **drafting,
    )  # fmt: skip
    with watch(note, HOPPER), torch.inference_mode():
        model.load(WeightReader(folder), lambda done, total: None)
        model.allocate_kv(4, BLOCK, torch.bfloat16)
        slots = model.make_lora_slots(8, 16)
        assert slots is not None
        model.use_lora_slots(slots)
        warm_up_kernels(model, config, BUDGET, LONGEST // BLOCK, 1, model.spec.vocab_size)
        warm = set(seen)
        for number, sequences in enumerate(serving(drafts)):
            ids, context = batch(sequences)
            # Every third step has adapters.
            rows = slots.sort([(0, np.arange(len(ids)))], len(ids), padded=False)
            staged = stage(ids, context, META, lora=() if number % 3 else rows)
            breaks.batch = staged.context
            hidden = model.forward(staged.token_ids, staged.context)
            count = len(context.seq_lens)
            heads = DeviceHeads(rows=_no_rows(slots, count, META))
            model.logits(hidden, None if number % 3 else heads)
        _choose(ops, model.spec.vocab_size)
    later = [key[0] for key in seen - warm]
    print(json.dumps({"warm": len(warm), "later": sorted(later)}))


if __name__ == "__main__":
    for folder, quantization in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(Path(folder), quantization or None)
