"""A family's description names the checkpoint's weights, with their shapes, before any is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from engine.models.layers.describe import describe
from engine.models.layers.linear import (
    FusedLinear,
    MoeBlock,
    NormDescription,
    described_linears,
)
from engine.models.registry import decoder_spec, read_config
from tests.engine.families.conftest import NATIVE


@pytest.mark.parametrize("name", list(NATIVE))
def test_all_that_is_described_is_in_the_checkpoint(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(name)
    spec = decoder_spec(read_config(folder))
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), "pt") as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    optional = spec.names.optional_prefix
    shapes |= {optional + key: shape for key, shape in shapes.items() if optional}

    described = describe(spec)
    linears: list[FusedLinear] = []
    norms: list[NormDescription] = [described.embedding_norm, described.final_norm]
    for layer in described.layers:
        linears += described_linears(layer)
        norms += [layer.input_norm, layer.attention_out_norm, layer.mlp_out_norm]
        norms += [norm for norm in (layer.mlp_norm, layer.residual_norm) if norm is not None]
    assert len(described.layers) == spec.num_layers
    for linear in linears:
        for part in linear.parts:
            expected = [part.rows, linear.columns]
            assert shapes[f"{part.name}.weight"] == (
                expected[::-1] if spec.transposed else expected
            )
            assert (f"{part.name}.bias" in shapes) >= linear.bias
    for norm in norms:
        if norm.name and spec.norm_weight:
            assert shapes[f"{norm.name}.weight"] == [norm.size]
    for table in (described.head, described.embedding):
        if table is not None:
            assert shapes[f"{table.name}.weight"] == [spec.vocab_size, spec.hidden_size]


def test_ranks_could_share_it_by_the_description(checkpoint: Callable[[str], Path]) -> None:
    """What feeds a product that is split by columns is split by rows; routers are whole."""
    for name in ("llama", "mixtral"):
        spec = decoder_spec(read_config(checkpoint(name)))
        for layer in describe(spec).layers:
            assert (layer.attention.qkv.split, layer.attention.o.split) == ("rows", "columns")
            if isinstance(layer.mlp, MoeBlock):
                assert layer.mlp.router.split == ""
            else:
                assert (layer.mlp.up.split, layer.mlp.down.split) == ("rows", "columns")
