"""Whatever is turned off, the kernels give the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.ablations import NAMES, OF_THE_LIBRARY, VARIABLE, turned_off
from kernels.attention_args import AttentionArgs
from kernels.cpu import CpuKernels
from kernels.errors import KernelsUnavailable
from kernels.interface import DecoderLayerWeights
from tests.kernels.batches import make_batch
from tests.kernels.conftest import RUNNABLE, load
from tests.kernels.test_decoder import SHAPE, make_layer, norm
from tests.kernels.test_decoder import make_batch as make_step


@pytest.fixture
def compiled() -> CpuKernels:
    """The best build alone: what is turned off is the same code in all of them."""
    kernels = load(RUNNABLE[0])
    assert isinstance(kernels, CpuKernels)
    return kernels


@pytest.fixture(params=OF_THE_LIBRARY)
def switch(request: pytest.FixtureRequest, compiled: CpuKernels) -> Iterator[str]:
    """A switch that is on again afterwards."""
    yield request.param
    compiled.library.turn(request.param, on=True)


def test_products_are_the_same(compiled: CpuKernels, threads: int, switch: str) -> None:
    torch.manual_seed(1)
    layers = [
        compiled.PackedLinear(torch.randn(500, 300), torch.randn(500)),
        compiled.PackedLinear(torch.randn(500, 300).bfloat16(), round_inputs=True),
        compiled.PackedLinear(torch.randn(500, 300), quantization="int8"),
        compiled.PackedLinear(torch.randn(500, 300), quantization="int4"),
    ]
    inputs = [torch.randn(rows, 300) for rows in (1, 5, 300)]
    inputs[1][0, 0], inputs[1][0, 299] = 1e30, -1e-40
    before = [layer(x) for layer in layers for x in inputs]
    compiled.library.turn(switch, on=False)
    after = [layer(x) for layer in layers for x in inputs]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("sliding_window", [0, 300])
def test_attention_is_the_same(
    compiled: CpuKernels, threads: int, switch: str, sliding_window: int
) -> None:
    batch = make_batch([(1, 1300), (1, 256), (9, 40), (1, 3)], heads=6, kv_heads=3, size=32)
    arguments = {**batch.arguments(), "sliding_window": sliding_window}
    before = compiled.paged_attention(AttentionArgs(**arguments))
    compiled.library.turn(switch, on=False)
    assert torch.equal(compiled.paged_attention(AttentionArgs(**arguments)), before)


def run_decoder(kernels: CpuKernels, layers: list[DecoderLayerWeights]) -> torch.Tensor:
    """The states of two of a step's tokens; its layers' caches are written again."""
    torch.manual_seed(3)
    step, tokens = make_step()
    decoder = kernels.compile_decoder(SHAPE, layers, norm(SHAPE.hidden_size))
    return decoder(torch.randn(tokens, SHAPE.hidden_size), *step, torch.tensor([30, 2]))


def test_the_decoder_is_the_same(compiled: CpuKernels, threads: int, switch: str) -> None:
    layers = [make_layer(compiled) for _ in range(2)]
    before = run_decoder(compiled, layers)
    compiled.library.turn(switch, on=False)
    assert torch.equal(run_decoder(compiled, layers), before)


def test_all_rows_through_the_last_layer_give_the_same(
    compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [make_layer(compiled) for _ in range(2)]
    before = run_decoder(compiled, layers)
    monkeypatch.setenv(VARIABLE, "last-rows")
    assert torch.equal(run_decoder(compiled, layers), before)


def test_a_cache_in_small_pages_is_as_large(
    compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "huge-pages")
    cache = compiled.new_kv_cache((700, 2, 16, 64), torch.float32)
    assert cache.shape == (700, 2, 16, 64)
    assert not cache.any()


def test_the_environment_turns_off_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " , ".join(reversed(NAMES)) + ",")
    try:
        kernels = CpuKernels()
        assert turned_off() == NAMES
        assert kernels.why.endswith("without " + ", ".join(NAMES))
        x, weight = torch.randn(40, 64), torch.randn(96, 64)
        torch.testing.assert_close(kernels.PackedLinear(weight)(x), x @ weight.T)
    finally:
        for name in OF_THE_LIBRARY:
            kernels.library.turn(name, on=True)


@pytest.mark.parametrize("text", ["prefetched", "prefetch,PREFETCH", "prefetch=0"])
def test_a_name_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        KernelsUnavailable, match=r"QUIRE_ABLATIONS has no '.*'; there are pre"
    ) as e:
        CpuKernels()
    assert e.value.param == VARIABLE


def test_the_library_knows_each_of_its_switches_and_no_other(compiled: CpuKernels) -> None:
    for name in OF_THE_LIBRARY:
        compiled.library.turn(name, on=True)
    with pytest.raises(ValueError, match="has no switch prefetched"):
        compiled.library.turn("prefetched", on=False)
