"""A whole decode step in one call gives what its parts give one by one, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.contract.sampling_params import SamplingParams
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler
from engine.sampling.uniforms import uniforms
from kernels.compiled_decoder import (
    BatchTables,
    BoundStep,
    CompiledStep,
    EmbeddingAndHead,
    LogitEditParams,
    StepSamplingParams,
)
from kernels.interface import KernelSet, LinearLayer
from tests.kernels.decoder_layers import compile_layers
from tests.kernels.test_decoder import BLOCK_SIZE, SHAPE, make_layer, norm

VOCAB, LONGEST = 77, 41
#: Tokens of each row of the tables, and how many of them came with the request.
LENGTHS, PROMPTS = [9, 1, 40, 16, 33], [3, 1, 40, 10, 2]
#: Out of order, and without the row in the middle.
ROWS = [4, 0, 3, 1]


def make_tables(groups: int = 1) -> BatchTables:
    """The second group's block tables are longer than the first's."""
    widths = [-(-LONGEST // BLOCK_SIZE) + 2 * group for group in range(groups)]
    tables = [torch.randperm(40)[: len(LENGTHS) * width] for width in widths]
    lengths = torch.tensor(LENGTHS)
    return BatchTables(
        tokens=torch.randint(VOCAB, (len(LENGTHS), LONGEST)).int(),
        block_tables=[table.view(len(LENGTHS), -1).int() for table in tables],
        num_prompt=torch.tensor(PROMPTS),
        num_tokens=lengths.clone(),
        num_computed=lengths - 1,
        rope_offsets=torch.zeros(len(LENGTHS), dtype=torch.int64),
    )


class Model:
    """Two layers with what is before and after them, and their step over some tables."""

    def __init__(self, kernels: KernelSet, groups: int = 1, **ends: object) -> None:
        self.kernels, self.tables = kernels, make_tables(groups)
        layers = [make_layer(kernels, group=index % groups) for index in range(2)]
        self.layers = layers
        self.caches = [cache for layer in layers for cache in (layer.key_cache, layer.value_cache)]
        decoder = compile_layers(kernels, SHAPE, layers, norm(SHAPE.hidden_size))
        assert decoder is not None
        self.decoder = decoder

        def table() -> LinearLayer:
            return kernels.PackedLinear(torch.randn(VOCAB, SHAPE.hidden_size))

        self.ends = EmbeddingAndHead(**{"embedding": table(), "head": table(), **ends})
        step = decoder.compile_step(self.ends, self.tables)
        assert step is not None
        self.step: CompiledStep = step

    def logits(self, rows: list[int]) -> Tensor:
        """The parts, one by one; the caches are left as they were."""
        t, ends = self.tables, self.ends
        positions = t.num_computed[rows]
        x = ends.embedding.rows(t.tokens[rows, positions].long()) * ends.embedding_scale
        if ends.positions is not None:
            x = x + ends.positions[positions + ends.position_offset]
        indexes = [
            (
                table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
                table[rows].contiguous(),
            )
            for table in t.block_tables
        ]
        initial_copies = [cache.clone() for cache in self.caches]
        starts = torch.arange(len(rows) + 1).int()
        hidden = self.hidden = self.decoder(
            x, positions, *indexes[0], (positions + 1).int(), starts, None, indexes[1:]
        )
        self.written = [cache.clone() for cache in self.caches]
        for cache, old in zip(self.caches, initial_copies, strict=True):
            cache.copy_(old)
        return ends.head(hidden) * ends.logit_scale


@pytest.mark.parametrize("groups", [1, 2])
def test_it_chooses_writes_and_counts(compiled: KernelSet, threads: int, groups: int) -> None:
    torch.manual_seed(1)
    learned = torch.randn(50, SHAPE.hidden_size)
    model = Model(
        compiled, groups, positions=learned, position_offset=2, embedding_scale=3.0, logit_scale=0.5
    )
    expected = compiled.argmax(model.logits(ROWS)).tolist()
    initial_sequence = dataclasses.replace(
        model.tables, tokens=model.tables.tokens.clone(), num_tokens=torch.tensor(LENGTHS)
    )
    assert tokens_of(model.step.bind(torch.tensor(ROWS), None)) == expected
    for row, token in zip(ROWS, expected, strict=True):
        initial_sequence.tokens[row, LENGTHS[row]] = token
        initial_sequence.num_tokens[row] += 1
    assert torch.equal(model.tables.tokens, initial_sequence.tokens)
    assert torch.equal(model.tables.num_tokens, initial_sequence.num_tokens)
    assert model.tables.num_computed[ROWS].tolist() == [LENGTHS[row] for row in ROWS]
    assert model.tables.num_computed[2] == LENGTHS[2] - 1
    assert all(map(torch.equal, model.caches, model.written))


def test_it_tells_what_the_head_took(compiled: KernelSet, threads: int) -> None:
    torch.manual_seed(8)
    model = Model(compiled, logit_scale=0.5)
    model.logits(ROWS)
    expected, run = model.hidden, model.step.bind(torch.tensor(ROWS), None)
    hidden = torch.full((len(ROWS), SHAPE.hidden_size), torch.nan)
    tables = model.tables
    initial_copies = [tensor.clone() for tensor in slots(tables)]

    def back() -> None:
        for tensor, old in zip(slots(tables), initial_copies, strict=True):
            tensor.copy_(old)

    outputs = run(hidden=hidden)
    assert torch.equal(hidden, expected)
    back()
    assert run() == outputs  # and nowhere, when nobody asks
    back()
    drafts = [2, 0, 3, 1]
    wide = torch.full((len(ROWS) + sum(drafts), SHAPE.hidden_size), torch.nan)
    run(drafts, hidden=wide)
    assert torch.isfinite(wide).all()
    assert torch.equal(wide[[0, 3, 4, 8]], expected)
    back()
    with pytest.raises(ValueError, match="hidden"):
        run(hidden=wide)


@pytest.mark.parametrize("drafts", [[0, 0, 0, 0], [2, 0, 3, 1]])
def test_with_taps_it_tells_what_these_layers_began_with(
    compiled: KernelSet, threads: int, drafts: list[int]
) -> None:
    torch.manual_seed(12)
    model, size = Model(compiled), SHAPE.hidden_size
    tapped = model.decoder.compile_step(model.ends, model.tables, [0, 1])
    assert tapped is not None
    wide = torch.full((len(ROWS) + sum(drafts), 2 * size), torch.nan)
    initial_copies = [tensor.clone() for tensor in slots(model.tables)]
    outputs = tapped.bind(torch.tensor(ROWS), None)(drafts, hidden=wide)
    for tensor, old in zip(slots(model.tables), initial_copies, strict=True):
        tensor.copy_(old)
    embedded_rows = [sum(drafts[:index]) + index for index in range(len(ROWS))]
    embedded = model.ends.embedding.rows(
        model.tables.tokens[ROWS, model.tables.num_computed[ROWS]].long()
    )
    assert torch.equal(wide[embedded_rows, :size], embedded)
    # Behind its first layer a model of one is where the second begins.
    first = compile_layers(compiled, SHAPE, model.layers[:1], norm(size))
    assert first is not None
    offset, residual = model.tables.num_computed[ROWS], embedded.clone()
    table = model.tables.block_tables[0][ROWS].contiguous()
    positions = (
        table[range(len(ROWS)), offset // BLOCK_SIZE].long() * BLOCK_SIZE + offset % BLOCK_SIZE
    )
    starts = torch.arange(len(ROWS) + 1).int()
    first(residual, offset, positions, table, (offset + 1).int(), starts)
    assert torch.equal(wide[embedded_rows, size:], residual)
    assert torch.isfinite(wide).all()
    assert tapped.bind(torch.tensor(ROWS), None)(drafts) == outputs  # and nowhere
    with pytest.raises(ValueError, match="hidden"):
        tapped.bind(torch.tensor(ROWS), None)(hidden=wide[: len(ROWS), :size].contiguous())
    with pytest.raises(ValueError, match="layers"):
        model.decoder.compile_step(model.ends, model.tables, [2])


@pytest.mark.parametrize("chosen", [0, 1, 3, 4])
def test_it_leaves_the_logits_of_the_last_rows_to_the_caller(
    compiled: KernelSet, threads: int, chosen: int
) -> None:
    torch.manual_seed(5)
    model = Model(compiled, logit_scale=0.5)
    expected = model.logits(ROWS)
    logits = torch.full((len(ROWS) - chosen, VOCAB), torch.nan)
    initial_copy = model.tables.tokens.clone()
    tokens = tokens_of(model.step.bind(torch.tensor(ROWS), None, logits))
    assert tokens == compiled.argmax(expected)[:chosen].tolist()
    assert torch.equal(logits, expected[chosen:])
    assert model.tables.num_computed[ROWS].tolist() == [LENGTHS[row] for row in ROWS]
    for index, row in enumerate(ROWS):
        assert model.tables.num_tokens[row] == LENGTHS[row] + (index < chosen)
        local_token = tokens[index] if index < chosen else int(initial_copy[row, LENGTHS[row]])
        assert int(model.tables.tokens[row, LENGTHS[row]]) == local_token
    with pytest.raises(ValueError, match="at most as many rows"):
        model.step.bind(torch.tensor(ROWS), None, torch.empty(len(ROWS) + 1, VOCAB))
    with pytest.raises(ValueError, match="logits"):
        model.step.bind(torch.tensor(ROWS), None, torch.empty(1, VOCAB + 1))


def test_a_row_is_the_same_alone(compiled: KernelSet, threads: int) -> None:
    torch.manual_seed(2)
    model = Model(compiled)
    together = model.step.bind(torch.tensor(ROWS), None)()
    model.tables.num_tokens.copy_(torch.tensor(LENGTHS))
    model.tables.num_computed.copy_(torch.tensor(LENGTHS) - 1)
    isolated = [model.step.bind(torch.tensor([row]), None)() for row in ROWS]
    assert isolated == [[tokens] for tokens in together]


def draws(seeds: np.ndarray, rows: int = len(ROWS)) -> StepSamplingParams:
    """The first rows' choice: random numbers, one of them greedy."""
    return StepSamplingParams(
        torch.tensor([1.0, 0.0, 2.0, 0.7])[:rows],
        torch.tensor([VOCAB, VOCAB, 30, VOCAB])[:rows],
        torch.tensor([1.0, 1.0, 1.0, 0.95]).double()[:rows],
        torch.tensor([0.0, 0.0, 0.0, 0.01]).double()[:rows],
        torch.from_numpy(seeds.view(np.int64))[:rows],
    )


SEEDS = np.array([2**64 - 1, 5, 2**63 + 12345, 2**40], dtype=np.uint64)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("chosen", [4, 2, 0])
@pytest.mark.parametrize("groups", [1, 2])
def test_drafts_give_what_decoding_one_by_one_gives_to_the_bit(
    compiled: KernelSet, threads: int, groups: int, chosen: int, greedy: bool
) -> None:
    """Rows with 5, 0, 3 and 7 drafts, of which 5, 0, 1 and 0 hold."""
    torch.manual_seed(6)
    model = Model(compiled, groups, logit_scale=0.1)
    tables = model.tables
    drafts, hold = [5, 0, 3, 7], [5, 0, 1, 0]
    choice = None if greedy else draws(SEEDS)
    initial_copies = [cache.clone() for cache in model.caches]
    reported_tokens: list[list[int]] = []
    logits: list[Tensor] = []
    for offset, row in enumerate(ROWS):
        local_params = (
            None
            if choice is None
            else StepSamplingParams(*(x[offset : offset + 1] for x in slots(choice)))
        )
        run, tokens = model.step.bind(torch.tensor([row]), local_params), []
        for _ in range(1 + hold[offset]):
            logits.append(model.logits([row]))
            tokens += tokens_of(run)
        reported_tokens.append(tokens)
    written = [cache.clone() for cache in model.caches]
    for cache, old in zip(model.caches, initial_copies, strict=True):
        cache.copy_(old)
    tables.num_tokens.copy_(torch.tensor(LENGTHS))
    tables.num_computed.copy_(torch.tensor(LENGTHS) - 1)
    for offset, row in enumerate(ROWS):
        invalid_tokens = [(token + 1) % VOCAB for token in [*reported_tokens[offset], *[0] * 8]]
        guessed = [*reported_tokens[offset][: hold[offset]], *invalid_tokens[hold[offset] :]][
            : drafts[offset]
        ]
        tables.tokens[row, LENGTHS[row] : LENGTHS[row] + drafts[offset]] = torch.tensor(
            guessed
        ).int()
    remaining_total = sum(drafts[chosen:]) + len(ROWS) - chosen
    opened = torch.full((remaining_total, VOCAB), torch.nan)
    some = choice if choice is None else StepSamplingParams(*(x[:chosen] for x in slots(choice)))
    bound = model.step.bind(torch.tensor(ROWS), some, torch.empty(len(ROWS) - chosen, VOCAB))
    assert bound(drafts, opened) == reported_tokens[:chosen]
    position, registered_total = 0, sum(1 + count for count in hold[:chosen])
    for offset, row in enumerate(ROWS):
        done = LENGTHS[row] + (hold[offset] if offset < chosen else drafts[offset])
        assert tables.num_computed[row] == done
        if offset < chosen:
            assert tables.num_tokens[row] == done + 1
            assert tables.tokens[row, LENGTHS[row] : done + 1].tolist() == reported_tokens[offset]
            continue
        assert tables.num_tokens[row] == LENGTHS[row]
        for step in range(1 + hold[offset]):
            assert torch.equal(opened[position + step], logits[registered_total + step][0])
        position, registered_total = (
            position + 1 + drafts[offset],
            registered_total + 1 + hold[offset],
        )
    for index, (cache, expected) in enumerate(zip(model.caches, written, strict=True)):
        table = tables.block_tables[index // 2 % groups]  # keys and values of a layer
        for offset, row in enumerate(ROWS):
            allocated_positions = torch.arange(LENGTHS[row] + hold[offset])
            blocks, positions = (
                table[row, allocated_positions // BLOCK_SIZE].long(),
                allocated_positions % BLOCK_SIZE,
            )
            assert torch.equal(cache[blocks, :, positions], expected[blocks, :, positions])


def tokens_of(run: BoundStep) -> list[int]:
    """Each row's only token; -1 where it gets none."""
    return [tokens[0] if tokens else -1 for tokens in run()]


def slots(of: StepSamplingParams | BatchTables) -> list[Tensor]:
    fields = [getattr(of, field.name) for field in dataclasses.fields(of)]
    lists = [field if isinstance(field, list) else [field] for field in fields]
    return [tensor for tensors in lists for tensor in tensors if tensor is not None]


def test_drafts_beyond_the_tables_are_refused(compiled: KernelSet) -> None:
    model = Model(compiled)
    bound = model.step.bind(torch.tensor(ROWS), None)
    initial_copies = [tensor.clone() for tensor in (*model.caches, *slots(model.tables))]
    for drafts in ([LONGEST - LENGTHS[4], 0, 0, 0], [0, -1, 0, 0], [0, 2**20, 0, 0]):
        with pytest.raises(ValueError, match="query"):
            bound(drafts)
    with pytest.raises(ValueError, match="drafts of 4 rows"):
        bound([0, 0])
    after = [*model.caches, *slots(model.tables)]
    assert all(map(torch.equal, initial_copies, after))


def test_it_draws_with_the_samplers_numbers(compiled: KernelSet, threads: int) -> None:
    torch.manual_seed(3)
    model = Model(compiled, logit_scale=0.02)
    seeds, choice = SEEDS, draws(SEEDS)
    run = model.step.bind(torch.tensor(ROWS), choice)
    for _ in range(3):
        generated = (model.tables.num_tokens - model.tables.num_prompt)[ROWS].numpy()
        numbers = torch.from_numpy(uniforms(seeds, generated))
        expected = compiled.sample(
            model.logits(ROWS),
            choice.temperature,
            choice.top_k,
            choice.top_p,
            choice.min_p,
            numbers,
        )
        assert tokens_of(run) == expected.tolist()


WISHES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logprobs": 0},
    {"logit_bias": {5: 9.0, 70: -3.5, 500: 1.0}, "bad_words_token_ids": [[9], [500], [3, 4]]},
    {"allowed_token_ids": [1, 2, 30, 31, 32, 64], "logprobs": 5, "temperature": 0},
    {"min_tokens": 7, "stop_token_ids": [4, 60], "min_p": 0.2, "logprobs": 200},
]


@pytest.mark.parametrize("turn", range(4))
def test_rows_with_wishes_get_what_the_sampler_gives_to_the_bit(
    compiled: KernelSet, threads: int, turn: int
) -> None:
    torch.manual_seed(turn)
    model = Model(compiled, logit_scale=0.2)
    tables, sampler = model.tables, Sampler([2], compiled)
    wishes = [*WISHES[turn:], *WISHES[:turn]]
    states = []
    for row, wish in zip(ROWS, wishes, strict=True):
        tokens, split = tables.tokens[row].tolist(), PROMPTS[row]
        if LENGTHS[row] > split:  # so that a bad word's beginning stands there
            tokens[LENGTHS[row] - 1] = tables.tokens[row, LENGTHS[row] - 1] = 3
        params = SamplingParams(**wish)
        states.append(
            RequestSamplingState(params, tokens[:split], tokens[split : LENGTHS[row]], row)
        )
    expected = sampler.sample(model.logits(ROWS), states)
    run = model.step.bind(torch.tensor(ROWS), sampler.step_choice(states, VOCAB))
    assert tokens_of(run) == expected.token_ids.tolist()
    assert run.scores is not None
    for index, (state, entry) in enumerate(zip(states, expected.logprobs, strict=True)):
        if entry is not None:
            top = 1 + min(VOCAB, state.params.logprobs or 0)
            values = [score[index, :top].tolist() for score in run.scores]
            assert values == [entry.token_ids, entry.logprobs, entry.ranks]


def test_wishes_that_do_not_fit_are_refused(compiled: KernelSet) -> None:
    model, baseline = Model(compiled), draws(SEEDS)
    for invalid, says in (
        ([LogitEditParams()], "each of 4 rows"),
        ([LogitEditParams(forbidden=[VOCAB])] * 4, "tokens must be in"),
        ([LogitEditParams(bias={-1: 1.0})] * 4, "tokens must be in"),
        ([LogitEditParams(words=[[1]])] * 4, "two tokens or more"),
        ([LogitEditParams(allowed=torch.zeros(1).int())] * 4, "allowed"),
    ):
        with pytest.raises(ValueError, match=says):
            model.step.bind(torch.tensor(ROWS), dataclasses.replace(baseline, edits=invalid))


def test_logits_that_are_no_numbers_give_no_token(compiled: KernelSet, threads: int) -> None:
    torch.manual_seed(4)
    weight = torch.randn(VOCAB, SHAPE.hidden_size)
    weight[7] = torch.nan
    model = Model(compiled, embedding=compiled.PackedLinear(weight))
    model.tables.tokens[:] = 6
    model.tables.tokens[3, LENGTHS[3] - 1] = 7
    initial_copy = model.tables.tokens.clone()
    tokens = tokens_of(model.step.bind(torch.tensor(ROWS), None))
    assert [token < 0 for token in tokens] == [row == 3 for row in ROWS]
    assert torch.equal(model.tables.tokens[3], initial_copy[3])


def nothing_to_compute(tables: BatchTables) -> None:
    tables.num_computed[4] += 1


def more_than_one_token(tables: BatchTables) -> None:
    tables.num_computed[4] -= 1


def no_free_slot(tables: BatchTables) -> None:
    tables.num_tokens[4], tables.num_computed[4] = LONGEST, LONGEST - 1


def no_such_token(tables: BatchTables) -> None:
    tables.tokens[4, LENGTHS[4] - 1] = VOCAB


def no_such_block(tables: BatchTables) -> None:
    tables.block_tables[0][4, 0] = 40


@pytest.mark.parametrize(
    "spoil", [nothing_to_compute, more_than_one_token, no_free_slot, no_such_token, no_such_block]
)
def test_it_refuses_what_is_no_decode(
    compiled: KernelSet, spoil: Callable[[BatchTables], None]
) -> None:
    model = Model(compiled)
    spoil(model.tables)
    initial_copies = [tensor.clone() for tensor in (*model.caches, *slots(model.tables))]
    with pytest.raises(ValueError, match=r"block|query|row"):
        model.step.bind(torch.tensor(ROWS), None)()
    after = [*model.caches, *slots(model.tables)]
    assert all(map(torch.equal, initial_copies, after))


def test_it_refuses_rows_and_positions_that_are_not_there(compiled: KernelSet) -> None:
    model = Model(compiled, positions=torch.randn(30, SHAPE.hidden_size))
    with pytest.raises(ValueError, match="row"):
        model.step.bind(torch.tensor([5]), None)()
    with pytest.raises(ValueError, match="position"):
        model.step.bind(torch.tensor([4]), None)()  # stands at 32
    with pytest.raises(ValueError, match="int64"):
        model.step.bind(torch.tensor([0]).int(), None)


def test_it_refuses_what_does_not_go_together(compiled: KernelSet) -> None:
    model = Model(compiled)
    with pytest.raises(ValueError, match="head must map"):
        model.decoder.compile_step(
            dataclasses.replace(model.ends, head=compiled.PackedLinear(torch.randn(VOCAB, 8))),
            model.tables,
        )
    with pytest.raises(ValueError, match="counts"):
        model.decoder.compile_step(
            model.ends, dataclasses.replace(model.tables, num_tokens=torch.zeros(3).long())
        )
