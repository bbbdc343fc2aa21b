"""A position's logits have the same bits however its sequence is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, LoRARequest
from tests.engine.families.conftest import NATIVE
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.lora.test_peft_equality import ALL
from tests.engine.one_result.conftest import CACHES, CONVERTED, FORMATS
from tests.engine.plain_paths import expert_by_expert, layer_by_layer
from tests.survey.one_result import Cut, Tokens, Watch, differing, run
from tests.survey.recipes import VOCAB

pytestmark = pytest.mark.usefixtures("compiler")
Engine = Callable[..., LLM]

#: Windows in KV cache groups, soft caps, sinks, ALiBi, heads of odd sizes, latents: with every
#: cache dtype.
#: Every other family has one of them.
WITH_ALL = ["llama", "gemma2", "gpt_oss", "bloom", "phi", "deepseek_v3"]
CASES = [(family, cache) for family in WITH_ALL for cache in CACHES] + [
    (family, CACHES[index % len(CACHES)])
    for index, family in enumerate(sorted(set(NATIVE).difference(WITH_ALL)))
]
#: What is cut at random: family, format of weights, cache dtype.
AT_RANDOM = [
    ("gemma2", "bfloat16", "bfloat16"),
    ("gemma2", "int4", "int8"),
    ("smollm3", "float16", "float16"),
    ("olmo3", "int8", "float32"),
    ("glm4", "bfloat16", "int8"),
    ("qwen2_moe", "float32", "bfloat16"),
    ("deepseek_v2", "bfloat16", "int8"),
]
#: Tokens of a prompt: what is decoded behind them begins a block, and chunks cross others.
LENGTH = 158
#: Behind it, decoded one by one and then known in part.
MORE = 6


def a_sequence(seed: int, length: int = LENGTH) -> Tokens:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, VOCAB) for _ in range(length))


@pytest.mark.parametrize(("family", "cache"), CASES)
def test_families_and_caches(family: str, cache: str, engine: Engine) -> None:
    assert differing(engine(family, "float32", cache), a_sequence(1), MORE) == 0


@pytest.mark.parametrize("weights", [*FORMATS, *CONVERTED, "gguf", "mxfp4"])
def test_formats_of_weights(weights: str, engine: Engine) -> None:
    family = "gpt_oss" if weights == "mxfp4" else "llama"
    assert differing(engine(family, weights, "auto"), a_sequence(2), MORE) == 0


class Adapted:
    """An engine that takes every second first token's prompts for an adapter's."""

    def __init__(self, llm: LLM, adapter: Path) -> None:
        self.core, self._llm = llm.core, llm
        self._adapter = LoRARequest("a", 1, str(adapter))

    def generate(self, prompts: list[list[int]], params: Any, **options: Any) -> Any:
        adapters = [self._adapter if prompt[0] % 2 else None for prompt in prompts]
        assert len(prompts) == 1 or 0 < adapters.count(None) < len(adapters)
        return self._llm.generate(prompts, params, lora_request=adapters, **options)


@pytest.mark.parametrize(("weights", "cache"), [("float32", "auto"), ("int4", "int8")])
def test_rows_with_an_adapter_beside_others(
    weights: str, cache: str, engine: Engine, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter(checkpoint("llama"), tmp_path / "adapter", target_modules=ALL)
    llm = engine("llama", weights, cache, enable_lora=True)
    adapted = cast(LLM, Adapted(llm, adapter))
    sequence = (5, *a_sequence(6))
    assert differing(adapted, sequence, MORE) == 0
    results = [
        run(model, Watch(), (*sequence, *[0] * 12), Cut(num_prompt_tokens=LENGTH + 1))
        for model in (llm, adapted)
    ]
    assert results[0] != results[1]


@pytest.mark.parametrize("path", [layer_by_layer, expert_by_expert])
def test_layer_by_layer(path: Callable[[], AbstractContextManager[Any]], engine: Engine) -> None:
    with path():
        llm = engine("mixtral", "bfloat16", "bfloat16")
        assert differing(llm, a_sequence(3), MORE) == 0


@pytest.mark.parametrize(("family", "weights", "cache"), AT_RANDOM)
def test_a_sequence_cut_at_random(family: str, weights: str, cache: str, engine: Engine) -> None:
    """Chunks, neighbours, preemptions, cache hits and threads, on one engine; some of the prompts
    beside it begin as it does."""
    llm, watch = engine(family, weights, cache, num_gpu_blocks_override=60), Watch()
    start = a_sequence(4, 60)
    (full,) = run(llm, watch, (*start, *[0] * 60), Cut(num_prompt_tokens=len(start)))

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def cut(data: st.DataObject) -> None:
        length = st.integers(1, len(full) - 1)
        seeds = data.draw(st.lists(st.integers(5, 8), max_size=5))
        extra = [(*full[: data.draw(length)], *a_sequence(seed, 20)) for seed in seeds]
        run(
            llm, watch, full,
            Cut(
                chunk=data.draw(st.sampled_from([1, 2, 7, 16, 33, 64, 500])),
                num_prompt_tokens=data.draw(length), other_sequences=tuple(extra),
                cold=data.draw(st.booleans()),
                threads=data.draw(st.integers(1, 3)),
            ),
        )  # fmt: skip
        assert not watch.differing

    cut()
    assert watch.again > 200
    # The others' sequences fit the pool together.
    assert llm.core.scheduler.num_preemptions > 0 or family not in ("gemma2", "smollm3")
