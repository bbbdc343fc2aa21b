"""Layers that use an earlier layer's keys and values keep no copy of them."""

from __future__ import annotations

from collections.abc import Callable

from engine.models.decoder import NativeDecoder
from tests.engine.families.conftest import Case
from tests.engine.families.test_latents import make, model_of, tokens
from tests.survey.recipes import RECIPES


def test_layers_of_gemma3n_that_share_keys_and_values_have_one_copy(
    case: Callable[[str], Case],
) -> None:
    """Three of six layers compute their own."""
    expected, recipe = case("gemma3n"), RECIPES["gemma3n"]
    llm = make(expected.folder)
    model = model_of(llm)
    assert isinstance(model, NativeDecoder)
    num_layers = recipe["num_hidden_layers"] - recipe["num_kv_shared_layers"]
    layer_bytes = 2 * recipe["num_key_value_heads"] * recipe["head_dim"] * 4
    assert llm.core.capacity.kv_bytes_per_token == num_layers * layer_bytes
    assert len(model.kv_caches) == num_layers
    buffers = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for cache in model.kv_caches
        for part in cache
        if part is not None
    }
    # Groups of a layer each take blocks from one pool.
    assert sum(buffers.values()) == 160 * 16 * layer_bytes
    assert tokens(llm, expected.prompts[:2]) == expected.greedy[:2]
