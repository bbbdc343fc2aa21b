"""A position's logits have the same bits however its sequence is cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM
from engine.survey.one_result import Cut, Tokens, Watch, differing, run
from engine.survey.recipes import VOCAB
from tests.engine.ablations import without
from tests.engine.one_result.conftest import CACHES, FORMATS, GGUF

pytestmark = pytest.mark.usefixtures("compiler")
Engine = Callable[..., LLM]

#: Windows in KV cache groups, soft caps, sinks, ALiBi, experts, heads of odd sizes, layer by layer.
FAMILIES = [
    "llama",
    "mistral",
    "gemma2",
    "gpt_oss",
    "bloom",
    "mixtral",
    "qwen2_moe",
    "phi",
    "arctic",
]
LENGTH = 150


def a_sequence(seed: int, length: int = LENGTH) -> Tokens:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, VOCAB) for _ in range(length))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_caches(family: str, cache: str, engine: Engine) -> None:
    assert differing(engine(family, "float32", cache), a_sequence(1), 12) == 0


@pytest.mark.parametrize("weights", [*FORMATS, *GGUF])
def test_formats_of_weights(weights: str, engine: Engine) -> None:
    assert differing(engine("llama", weights, "auto"), a_sequence(2), 12) == 0


@pytest.mark.parametrize("off", ["decoder", "experts"])
def test_layer_by_layer(off: str, engine: Engine) -> None:
    with without(off):
        llm = engine("mixtral", "bfloat16", "bfloat16")
        assert differing(llm, a_sequence(3), 12) == 0


@pytest.mark.parametrize(("weights", "cache"), [("bfloat16", "bfloat16"), ("int4", "int8")])
def test_a_sequence_cut_at_random(weights: str, cache: str, engine: Engine) -> None:
    """Chunks, neighbours, preemptions, cache hits and threads, on one engine; some of the prompts
    beside it begin as it does."""
    llm, watch = engine("gemma2", weights, cache, num_gpu_blocks_override=60), Watch()
    start = a_sequence(4, 60)
    (whole,) = run(llm, watch, (*start, *[0] * 60), Cut(known=len(start)))

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def cut(data: st.DataObject) -> None:
        length = st.integers(1, len(whole) - 1)
        seeds = data.draw(st.lists(st.integers(5, 8), max_size=5))
        beside = [(*whole[: data.draw(length)], *a_sequence(seed, 20)) for seed in seeds]
        run(
            llm, watch, whole,
            Cut(
                chunk=data.draw(st.sampled_from([1, 2, 7, 16, 33, 64, 500])),
                known=data.draw(length), beside=tuple(beside), cold=data.draw(st.booleans()),
                threads=data.draw(st.integers(1, 3)),
            ),
        )  # fmt: skip
        assert not watch.differing

    cut()
    assert watch.again > 500
    assert llm.core.scheduler.num_preemptions > 3
