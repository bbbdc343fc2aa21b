"""Same seed, same text: default settings, a trained model, preemptions and resumptions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore
from tests.engine.speculative.free import make_drafts_free

pytestmark = pytest.mark.usefixtures("compiler")

DEMO = Path(__file__).parents[3] / "demo" / "model"
TOKENS = 48
#: What the streams ask for in turn.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_p": 0.9, "logprobs": 3},
    {"temperature": 0, "logprobs": 2, "frequency_penalty": 0.4},
    {"top_k": 40, "repetition_penalty": 1.2},
    {"min_p": 0.05, "logit_bias": {20: 1.5}, "bad_words_token_ids": [[30, 31]]},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ,.]{400}")},
    {"temperature": 0, "presence_penalty": 0.6, "min_tokens": 30, "stop_token_ids": [25]},
]
STREAMS = 2 * len(KINDS)
Stream = tuple[list[int], list[TokenLogprobs]]


def request(index: int, name: str, resumed: list[int] | None = None) -> EngineRequest:
    rng = random.Random(index)
    prompt = [rng.randrange(100, 3000) for _ in range(rng.randrange(5, 60))]
    options = {"temperature": 1.0, "seed": index, **KINDS[index % len(KINDS)]}
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options)
    return EngineRequest(
        request_id=f"{name}-{index}", gateway_id="g", prompt_token_ids=prompt, sampling=sampling,
        resume_token_ids=[resumed] if resumed else [],
    )  # fmt: skip


def streams(core: EngineCore, requests: list[EngineRequest]) -> dict[str, Stream]:
    """What each gets: tokens, and their log probabilities."""
    streams_by_id: dict[str, Stream] = {message.request_id: ([], []) for message in requests}
    for message in requests:
        core.add_request(message)
    for _ in range(20_000):
        if not core.has_work:
            break
        for delta in core.step():
            assert delta.error is None
            streams_by_id[delta.request_id][0].extend(delta.token_ids)
            streams_by_id[delta.request_id][1].extend(delta.logprobs or [])
    core.check_integrity()
    return streams_by_id


def engine(**settings: Any) -> EngineCore:
    """All that isn't named is as it is by default."""
    settings = {"num_gpu_blocks_override": 400, "max_model_len": 512, **settings}
    return EngineCore(EngineConfig(model=str(DEMO), **settings))


@pytest.fixture(scope="module")
def run_separately() -> list[Stream]:
    """Each stream on its own."""
    core = engine()
    return [streams(core, [request(i, "alone")])[f"alone-{i}"] for i in range(STREAMS)]


@pytest.mark.parametrize("cached", [True, False])
def test_preempted_streams_go_on_with_the_same_tokens(
    cached: bool, run_separately: list[Stream]
) -> None:
    core = engine(
        num_gpu_blocks_override=28, max_num_batched_tokens=64, enable_prefix_caching=cached
    )
    together = streams(core, [request(i, "r") for i in range(STREAMS)])
    assert [together[f"r-{i}"] for i in range(STREAMS)] == run_separately
    assert core.scheduler.num_preemptions > STREAMS / 2


def test_drafted_streams_go_on_with_the_same_tokens(
    run_separately: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several positions of a sequence in a step, most of them for nothing."""
    make_drafts_free(monkeypatch)
    draft = {"model": str(DEMO.parent / "draft"), "num_speculative_tokens": 4}
    core = engine(speculative_config=draft, num_gpu_blocks_override=60)
    together = streams(core, [request(i, "d") for i in range(STREAMS)])
    assert [together[f"d-{i}"] for i in range(STREAMS)] == run_separately
    stats = core.stats
    accepted = stats.spec_decode_num_accepted_tokens_total
    assert STREAMS < accepted < stats.spec_decode_num_draft_tokens_total
    assert core.scheduler.num_preemptions > 0


def test_resumed_streams_go_on_with_the_same_tokens(run_separately: list[Stream]) -> None:
    """As after a killed engine: another one gets the prompt and the tokens so far."""
    core, rng = engine(), random.Random(9)
    for turn in range(2):
        index = [rng.randrange(1, len(tokens)) for tokens, _ in run_separately]
        streams_by_id = streams(
            core, [request(i, f"t{turn}", run_separately[i][0][: index[i]]) for i in range(STREAMS)]
        )
        for i, (tokens, logprobs) in enumerate(run_separately):
            rest = streams_by_id[f"t{turn}-{i}"]
            assert rest == (tokens[index[i] :], logprobs[index[i] :]), (i, index[i])
        core.reset_prefix_cache()
