"""Whatever is asked together, drafts change nothing: mixes that hypothesis makes up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM
from engine.offline.outputs import RequestOutput
from tests.engine.models import VOCAB
from tests.engine.speculative.seer import Seer
from tests.engine.speculative.test_equality import MIXED, make, texts

pytestmark = pytest.mark.usefixtures("always_drafts")


@pytest.fixture(scope="module")
def baseline_llm(model_folder: Callable[[str], Path]) -> LLM:
    """Without drafts, and with room for all."""
    return make(model_folder("llama"))


@pytest.fixture
def drafting(model_folder: Callable[[str], Path]) -> LLM:
    """With drafts; a pool in which rows must give way to each other, and prompts go in pieces."""
    return make(
        model_folder("llama"), num_gpu_blocks_override=16, max_model_len=128, max_num_seqs=6,
        max_num_batched_tokens=40, speculative_config={"method": "ngram"},
    )  # fmt: skip


_ASKED = st.lists(
    st.tuples(st.sampled_from(sorted(MIXED)), st.integers(1, 50), st.integers(0, 2**20)),
    min_size=1,
    max_size=5,
)


def _scores(outputs: list[RequestOutput]) -> list[list[object]]:
    return [[completion.logprobs for completion in output.outputs] for output in outputs]


@settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(_ASKED, st.sampled_from([0.0, 0.3, 0.9]))
def test_any_mix_says_the_same_to_the_bit(
    baseline_llm: LLM, drafting: LLM, asked: list[tuple[str, int, int]], lies: float
) -> None:
    """`lies`: how many of the drafts are wrong."""
    rng = random.Random(str(asked))
    prompts = [[rng.randrange(4, VOCAB) for _ in range(length)] for _, length, _ in asked]
    params = [msgspec.structs.replace(MIXED[kind], seed=seed) for kind, _, seed in asked]
    expected = baseline_llm.generate(prompts, params, use_tqdm=False)
    Seer.texts = {
        tuple(prompt): [list(completion.token_ids) for completion in output.outputs]
        for prompt, output in zip(prompts, expected, strict=True)
    }
    Seer.rng = random.Random(1)
    Seer.rng.random = lambda: 0.0 if rng.random() < lies else 1.0  # type: ignore[method-assign]
    outputs = drafting.generate(prompts, params, use_tqdm=False)
    assert texts(outputs) == texts(expected)
    assert _scores(outputs) == _scores(expected)
    drafting.core.check_integrity()
    pool = drafting.core.scheduler.kv.pool
    assert pool.num_free_blocks == drafting.core.capacity.num_blocks
