"""Ranks share models of the Transformers bridge by transformers' plans, with the bits of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.core.engine_core import EngineCore
from tests.engine.bridge.conftest import checkpoint
from tests.engine.ranks.test_tensor_parallel import outputs, running
from tests.survey.bridged import BRIDGED, CROSS_CHECKED, STATEFUL

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
BRIDGE = {"model_impl": "transformers", "skip_tokenizer_init": True, "max_model_len": 256}
#: What has no plan for linear layers, or one with styles that aren't applied.
UNPLANNED: dict[str, str] = {}


def both(folder: Path, size: int = 2, **settings: Any) -> tuple[Any, Any]:
    with running(folder, 1, **BRIDGE, **settings) as one:
        expected = outputs(one)
    with running(folder, size, **BRIDGE, **settings) as many:
        return expected, outputs(many)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # Own heads, and few blocks; a norm over all heads, windows, and quantized weights.
        ("arcee", {"num_gpu_blocks_override": 6, "max_num_batched_tokens": 16}),
        ("olmo3", {"quantization": "int8"}),
    ],
)
def test_two_ranks_give_the_bits_of_one(
    family: str, options: dict[str, Any], checkpoint: Folder
) -> None:
    expected, output = both(checkpoint(family), **options)
    assert output == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", [*BRIDGED, *STATEFUL, *CROSS_CHECKED])
def test_every_family_gives_the_bits_of_one_or_is_refused(family: str, checkpoint: Folder) -> None:
    if reason := UNPLANNED.get(family):
        with pytest.raises((ConfigError, ModelLoadError), match=reason):
            both(checkpoint(family))
        return
    expected, output = both(checkpoint(family))
    assert output == expected


def test_a_rank_has_its_heads_and_its_rows(checkpoint: Folder) -> None:
    sizes = []
    for size in (1, 2):
        with running(checkpoint("arcee"), size, **BRIDGE) as llm:
            worker = llm.core.executor.worker
            attention = worker.loaded.model.model.model.layers[0].self_attn
            linears = (attention.q_proj, attention.o_proj)
            sizes.append(
                [linear.layer.nbytes for linear in linears]
                + [worker.loaded.model.layers[0].caches[0].shape[1]]
            )
            assert worker.capacity.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert sizes[0] == [2 * share for share in sizes[1]]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("biogpt", {}, "BioGptForCausalLM .* has no plan"),
        ("arcee", {"tensor_parallel_size": 4}, r"num_key_value_heads \(2\) can't be split evenly"),
        ("arcee", {"enable_expert_parallel": True}, "enable_expert_parallel can't be used"),
        ("arcee", {"decode_context_parallel_size": 2}, "decode_context_parallel_size can't be"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    family: str, options: dict[str, Any], reason: str, checkpoint: Folder
) -> None:
    settings = {"tensor_parallel_size": 2, **BRIDGE, **options}
    with pytest.raises(ConfigError, match=reason):
        EngineCore(EngineConfig(model=str(checkpoint(family)), **settings))
