"""A bridged model's linear layers and tables, packed."""

from __future__ import annotations

import torch
from torch import nn

import kernels
from engine.quantization.packing import QuantScheme, make_quant_scheme
from engine.transformers_backend.linear import PackedModule, Table, pack


class Small(nn.Module):
    """Two tables (one may be tied to the output), a layer that is used twice, a router, a norm."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(40, 32), nn.Embedding(8, 32)
        self.first = self.second = nn.Linear(32, 32)
        self.gate = nn.Linear(32, 4, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 40, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[-1]))
        x = x + self.second(self.first(x)) @ self.first.weight.T
        x = self.norm(x.to(self.first.weight.dtype)) * self.gate(x).softmax(-1)[..., :1]
        return self.head(x)


def make_small(dtype: torch.dtype = torch.float32, tied: bool = True) -> Small:
    torch.manual_seed(0)
    return Small(tied).to(dtype)


IDS = torch.tensor([[3, 39, 0]])


@torch.inference_mode()
def test_packed_it_computes_the_same() -> None:
    model = make_small()
    expected_model = model(IDS)
    pack(model, kernels.get("cpu"), QuantScheme())
    assert torch.allclose(model(IDS), expected_model, atol=1e-5)
    assert model.first is model.second


@torch.inference_mode()
def test_a_tied_table_is_kept_once_and_weights_go() -> None:
    model = make_small()
    pack(model, kernels.get("cpu"), QuantScheme())
    assert isinstance(model.words, Table)
    assert isinstance(model.head, PackedModule)
    assert model.words._layer is model.head.layer
    assert {name for name, _ in model.named_parameters()} == {"norm.weight", "norm.bias"}


@torch.inference_mode()
def test_bfloat16_weights_stay_and_everything_else_is_float32() -> None:
    half = make_small(torch.bfloat16, tied=False)
    expected = make_small(torch.bfloat16, tied=False).float()(IDS)
    read = pack(half, kernels.get("cpu"), QuantScheme())
    assert read < 0.6 * pack(make_small(tied=False), kernels.get("cpu"), QuantScheme())
    assert half(IDS).dtype == torch.float32
    assert torch.allclose(half(IDS), expected, atol=1e-2)
    assert half.norm.weight.dtype == torch.float32
    assert half.positions.weight.dtype == torch.bfloat16


@torch.inference_mode()
def test_routers_and_positions_arent_rounded() -> None:
    model, rounded = make_small(tied=False), make_small(tied=False)
    pack(rounded, kernels.get("cpu"), make_quant_scheme("int8"))
    assert torch.equal(rounded.gate.weight + 0, model.gate.weight)
    assert torch.equal(rounded.positions.weight, model.positions.weight)
    for name in ("first", "head", "words"):
        ours, theirs = (getattr(side, name).weight + 0 for side in (rounded, model))
        assert not torch.equal(ours, theirs)
        assert torch.allclose(ours, theirs, atol=0.05)


@torch.inference_mode()
def test_a_weights_dtype_is_told_without_unpacking_it() -> None:
    class Counting:
        in_features, out_features, reads = 3, 2, 0

        def rows(self, ids: torch.Tensor) -> torch.Tensor:
            self.reads += 1
            return torch.ones(2, 3)

    layer = Counting()
    weight = PackedModule(layer, None).weight  # type: ignore[arg-type]
    assert (weight.dtype, tuple(weight.shape), layer.reads) == (torch.float32, (2, 3), 0)
    assert (weight @ torch.ones(3)).tolist() == [3.0, 3.0]
    assert layer.reads == 1
