"""Whether an engine gives a position's logits the same bits however its steps were cut.

Logits are a function of the tokens before them and of nothing else: not of how a prompt was cut
into chunks, of what was computed beside it, of whether a token's keys came from its decode, from a
chunk or from the prefix cache, of a preemption or of the number of threads. `Watch` sees the logits
that an engine's sampler gets, and keeps those that differ from earlier ones behind the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contract.sampling_params import SamplingParams
from engine.offline.llm import LLM
from kernels.cpu import memory as threads

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to run a sequence.

    Attributes:
        chunk: most tokens of a step.
        num_prompt_tokens: its first so many tokens come as the prompt, the others are generated.
        other_sequences: what is generated together with it.
        cold: whether the prefix cache is emptied before.
        threads: of the kernels.
    """

    chunk: int = 8192
    num_prompt_tokens: int = 1
    other_sequences: tuple[Tokens, ...] = ()
    cold: bool = True
    threads: int = 1


@dataclass(slots=True)
class Watch:
    """The logits that an engine makes, by the tokens before them.

    Attributes:
        seen: float32 [vocab] behind each row of tokens, the first that were made.
        differing: tokens behind which others were made later.
        again: how often the same were made again.
    """

    seen: dict[Tokens, Tensor] = field(default_factory=dict)
    differing: list[Tokens] = field(default_factory=list)
    again: int = 0

    def observe(self, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
        """A logits processor that changes nothing."""
        tokens = (*prompt, *output)
        first = self.seen.setdefault(tokens, logits.clone())
        if not torch.equal(first.view(torch.int32), logits.view(torch.int32)):
            self.differing.append(tokens)
        else:
            self.again += first is not logits
        return logits

    def params(self, count: int) -> SamplingParams:
        """`count` greedy tokens that are watched."""
        return SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logits_processors=[self.observe]
        )


def run(llm: LLM, watch: Watch, sequence: Tokens, cut: Cut) -> list[Tokens]:
    """Generate what of `sequence` isn't known, watched; gives all the sequences, its own first.

    Every second one of those beside it is unwatched, so that kernels choose its tokens, and each is
    generated for as long as `sequence` is.
    """
    if cut.cold:
        llm.core.reset_prefix_cache()
    scheduler = llm.core.scheduler
    limits = scheduler.limits
    initial = limits.token_budget, limits.max_chunk_tokens
    counted = threads.num_threads()
    expected_count = len(sequence) - cut.num_prompt_tokens
    baseline_sampling_params = SamplingParams(
        temperature=0, max_tokens=expected_count, ignore_eos=True
    )
    prompts = [list(sequence[: cut.num_prompt_tokens]), *map(list, cut.other_sequences)]
    settings = [
        watch.params(expected_count) if i % 2 == 0 else baseline_sampling_params
        for i in range(len(prompts))
    ]
    try:
        limits.token_budget = limits.max_chunk_tokens = max(cut.chunk, len(prompts))
        threads.use_threads(cut.threads)
        outputs = llm.generate(prompts, settings, use_tqdm=False)
    finally:
        limits.token_budget, limits.max_chunk_tokens = initial
        threads.use_threads(counted)
    return [
        (*prompt, *output.outputs[0].token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def differing(llm: LLM, prompt: Sequence[int], count: int = 24) -> int:
    """Positions whose logits depend on how they are computed, of this sequence and those beside it.

    `count` tokens behind `prompt` are decoded one by one first, and then known in part, in chunks
    of several sizes, beside others and with what the cache holds.
    """
    watch = Watch()
    start = len(prompt)
    blank = (*prompt, *(0,) * count)
    (full,) = run(llm, watch, blank, Cut(num_prompt_tokens=start))
    other_prompts = tuple(
        tuple(prompt[index:] or prompt) for index in range(0, start, max(1, start // 4))
    )
    for registered_index in range(start + 1, start + count, 5):
        run(llm, watch, full, Cut(num_prompt_tokens=registered_index))
        run(
            llm,
            watch,
            full,
            Cut(num_prompt_tokens=registered_index, chunk=13, other_sequences=other_prompts),
        )
        run(
            llm,
            watch,
            full,
            Cut(num_prompt_tokens=registered_index, chunk=3, cold=False, threads=2),
        )
    return len(set(watch.differing))
