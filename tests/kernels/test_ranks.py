"""Ranks, here threads of one process, gather what each has, or learn that another has failed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

import pytest
import torch

from kernels.cpu import CpuKernels
from kernels.cpu.ranks import SLOT_BYTES
from kernels.errors import RankError, RankTimeout
from kernels.interface import ActivationSpec, ExpertLayers, LinearLayer, RankGroup
from kernels.layers import AbsentLinear, MixtureOfExperts

pytestmark = pytest.mark.usefixtures("compiled")

T = TypeVar("T")


def join(size: int, timeout_s: float = 30.0) -> list[RankGroup]:
    ops = CpuKernels()
    memory = mmap.mmap(-1, ops.rank_memory_bytes(size))
    return [ops.join_ranks(memory, rank, size, timeout_s) for rank in range(size)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as threads:
        yield threads


def on_all(
    pool: ThreadPoolExecutor, ranks: list[RankGroup], run: Callable[[RankGroup], T]
) -> list[T]:
    return [future.result(60) for future in [pool.submit(run, rank) for rank in ranks]]


def gather_of(x: torch.Tensor, starts: Sequence[int]) -> Callable[[RankGroup], torch.Tensor]:
    """Has each rank give its columns of x."""

    def gather(rank: RankGroup) -> torch.Tensor:
        first, end = starts[rank.rank : rank.rank + 2]
        return rank.gather(x[:, first:end].contiguous(), starts)

    return gather


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_all_ranks_gather_the_same(pool: ThreadPoolExecutor, size: int, rows: int) -> None:
    ranks, widest = join(size), SLOT_BYTES // 4 // 40  # 300 rows don't fit at once
    starts = [0, widest, *(widest + 5 * rank for rank in range(1, size))]
    for _ in range(3):
        x = torch.randn(rows, starts[-1])
        for gathered in on_all(pool, ranks, gather_of(x, starts)):
            assert torch.equal(gathered, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_layer_gives_the_bits_of_a_whole_one(
    pool: ThreadPoolExecutor, dtype: torch.dtype
) -> None:
    ops, ranks = CpuKernels(), join(2)
    weight, bias = torch.randn(100, 48).to(dtype), torch.randn(100)
    x, outputs, inputs = torch.randn(9, 48), (0, 64, 100), (0, 32, 48)
    full = ops.PackedLinear(weight, bias)
    ids = torch.tensor([0, 63, 64, 99, 5])

    def compute(rank: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(outputs[rank.rank], outputs[rank.rank + 1])
        columns = slice(inputs[rank.rank], inputs[rank.rank + 1])
        layer = ops.PackedLinear(weight[rows], bias[rows])
        rank.shard_linear(layer, outputs, inputs)
        assert (layer.out_features, layer.in_features) == (100, columns.stop - columns.start)
        return layer(x[:, columns]), layer.rows(ids)

    for product, rows in on_all(pool, ranks, compute):
        assert torch.equal(product, full(x))
        assert torch.equal(rows, full.rows(ids))


def test_experts_of_several_ranks_give_the_bits_of_all_in_one(pool: ThreadPoolExecutor) -> None:
    ops, ranks, hidden, inner = CpuKernels(), join(2), 4096, 16
    owners, moved = ((0,), (1,), (1,)), ((0, 1), (1,), (0,))
    ups = [torch.randn(2 * inner, hidden) / 64 for _ in range(3)]
    downs = [torch.randn(hidden, inner) for _ in range(3)]
    # More rows than go together, and more than fit into a slot.
    x, router = torch.randn(700, hidden), torch.randn(3, hidden)

    def run(rank: RankGroup | None = None) -> torch.Tensor:
        def pack(index: int, weights: list[torch.Tensor]) -> LinearLayer:
            if rank is None or rank.rank in owners[index]:
                return ops.PackedLinear(weights[index])
            return AbsentLinear(*reversed(weights[index].shape))

        experts = ExpertLayers(
            router=ops.PackedLinear(router),
            gate_up=[pack(index, ups) for index in range(3)],
            down=[pack(index, downs) for index in range(3)],
            top_k=2,
            softmax_first=True,
            renormalize=True,
            activation=ActivationSpec("silu"),
            ranks=rank,
            owners=() if rank is None else owners,
        )
        compiled = ops.compile_experts(experts)
        previous = compiled(x)
        if rank is None:
            return previous
        counts = compiled.loads.copy()
        compiled.move(
            moved,
            {
                index: (ops.PackedLinear(ups[index]), ops.PackedLinear(downs[index]))
                for index, new in enumerate(moved)
                if rank.rank in new and rank.rank not in owners[index]
            },
        )
        after = compiled(x)
        assert torch.equal(previous, after)
        assert counts.sum() == 2 * len(x)
        assert compiled.loads.tolist() == (2 * counts).tolist()
        return after

    expected = run()
    assert all(torch.equal(output, expected) for output in on_all(pool, ranks, run))


@pytest.mark.parametrize("row_ranks", [1, 2])
def test_ranks_with_rows_of_their_own_share_experts(
    pool: ThreadPoolExecutor, row_ranks: int
) -> None:
    ops, ranks, hidden, inner, count = CpuKernels(), join(3 * row_ranks), 64, 16, 5
    weights = [
        (torch.randn(2 * inner, hidden) / 8, torch.randn(hidden, inner)) for _ in range(count)
    ]
    last = len(ranks) - 1
    router, owners = torch.randn(count, hidden), ((0,), (0, 2), (1,), (2,), (last,))
    shared = [torch.randn(2 * inner, hidden) / 8, torch.randn(hidden, inner)]

    def compiled(rank: RankGroup | None = None) -> MixtureOfExperts:
        def pack(index: int, part: int) -> LinearLayer:
            weight = weights[index][part]
            if rank is None or rank.rank in owners[index]:
                return ops.PackedLinear(weight)
            return AbsentLinear(*reversed(weight.shape))

        return ops.compile_experts(
            ExpertLayers(
                router=ops.PackedLinear(router),
                gate_up=[pack(index, 0) for index in range(count)],
                down=[pack(index, 1) for index in range(count)],
                top_k=2,
                softmax_first=True,
                renormalize=True,
                activation=ActivationSpec("silu"),
                shared_gate_up=ops.PackedLinear(shared[0]),
                shared_down=ops.PackedLinear(shared[1]),
                ranks=rank,
                owners=() if rank is None else owners,
                row_ranks=0 if rank is None else row_ranks,
            )
        )

    # One has more rows than go together, and one has none.
    x = [torch.randn(rows, hidden) for rows in (400, 0, 3)]
    of_all = compiled()
    experts = {rank.rank: compiled(rank) for rank in ranks}
    for _ in range(2):
        results = on_all(pool, ranks, lambda rank: experts[rank.rank](x[rank.rank // row_ranks]))
        assert all(
            torch.equal(output, of_all(x[index // row_ranks]))
            for index, output in enumerate(results)
        )


def test_a_rank_listens_until_another_one_waits_for_it(pool: ThreadPoolExecutor) -> None:
    (one, two), x, starts = join(2), torch.ones(1, 2), (0, 2, 4)
    one.interrupt()
    assert not one.listen()  # it was before
    for _ in range(3):
        waits = pool.submit(two.gather, x, starts)
        assert one.listen()
        one.gather(x, starts)
        assert waits.result(60).sum() == 4
    listens = pool.submit(one.listen)
    one.interrupt()
    assert not listens.result(60)
    listens = pool.submit(one.listen)
    two.fail()
    with pytest.raises(RankError, match="another rank has failed"):
        listens.result(60)


def test_a_rank_that_does_not_come_is_named_and_all_begin_anew(pool: ThreadPoolExecutor) -> None:
    ranks, x, starts = join(2, timeout_s=0.2), torch.ones(1, 2), (0, 2, 4)
    with pytest.raises(RankError, match="in time"):
        ranks[0].gather(x, starts)
    assert ranks[0].missing_rank == 1
    ranks[1].gather(x, starts)  # what the other one has written is there
    with pytest.raises(RankError, match="another rank has failed"):
        ranks[1].gather(x, starts)
    for rank in ranks:
        rank.reset()
    ranks[0].forget_failure()
    assert ranks[0].missing_rank is None
    gathered = on_all(pool, ranks, lambda rank: rank.gather(x, starts))
    assert all(torch.equal(gathered_tensor, torch.ones(1, 4)) for gathered_tensor in gathered)


class Mail:
    """Exchanges slots between threads."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], SimpleQueue[torch.Tensor]]) -> None:
        self.rank, self.boxes = rank, boxes

    def exchange(self, slots: Sequence[torch.Tensor]) -> None:
        peers = [rank for rank in range(len(slots)) if rank != self.rank]
        for other in peers:
            self.boxes[self.rank, other].put(slots[self.rank].clone())
        for other in peers:
            try:
                slots[other].copy_(self.boxes[other, self.rank].get(timeout=60))
            except Empty as error:
                raise RankTimeout(other, "nothing has come") from error

    def reset(self) -> None:
        for other in range(2):
            while other != self.rank and not self.boxes[other, self.rank].empty():
                self.boxes[other, self.rank].get()


def test_ranks_without_shared_memory_exchange_what_they_gather(pool: ThreadPoolExecutor) -> None:
    ops, starts = CpuKernels(), [0, SLOT_BYTES // 4 // 40, SLOT_BYTES // 4 // 40 + 5]
    boxes: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {
        pair: SimpleQueue() for pair in ((0, 1), (1, 0))
    }
    ranks = [
        ops.join_ranks(
            mmap.mmap(-1, ops.rank_memory_bytes(2)), rank, 2, 30.0, exchange=Mail(rank, boxes)
        )
        for rank in range(2)
    ]
    for rows in (1, 300):
        x = torch.randn(rows, starts[-1])
        assert all(torch.equal(all_of, x) for all_of in on_all(pool, ranks, gather_of(x, starts)))
    assert all(rank.waited_s > 0 for rank in ranks)
    ranks[0].fail()
    with pytest.raises(RankError, match="another rank has failed"):
        ranks[0].gather(torch.ones(1, starts[1]), starts)
    for rank in ranks:
        rank.reset()
        rank.forget_failure()
    x = torch.randn(1, starts[-1])
    assert all(torch.equal(all_of, x) for all_of in on_all(pool, ranks, gather_of(x, starts)))


def test_a_failure_wakes_those_that_wait(pool: ThreadPoolExecutor) -> None:
    ranks = join(2)
    waiting = pool.submit(ranks[0].gather, torch.ones(1, 2), (0, 2, 4))
    ranks[1].fail()
    with pytest.raises(RankError, match="another rank has failed"):
        waiting.result(60)


def test_groups_and_layers_that_do_not_fit_are_refused() -> None:
    ops, (rank, _) = CpuKernels(), join(2)
    with pytest.raises(ValueError, match="share"):
        ops.join_ranks(mmap.mmap(-1, 4096), 0, 2, 1.0)
    with pytest.raises(ValueError, match="at most 64"):
        ops.join_ranks(mmap.mmap(-1, ops.rank_memory_bytes(65)), 0, 65, 1.0)
    with pytest.raises(ValueError, match="has 4 rows, not 2"):
        rank.shard_linear(ops.PackedLinear(torch.ones(4, 8)), (0, 2, 4))
