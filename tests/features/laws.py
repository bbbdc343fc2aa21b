"""What results with a feature fulfil, whatever other feature is there.

Those that change nothing but how results come about are in `engine_threads`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import msgspec

from engine.contract.messages import EngineRequest, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from inference.chat.parsers import OutputParser, OutputParserConfig
from inference.parsers.json_tools import HermesParser
from tests.features.lab import Lab, Run
from tests.features.workload import (
    BUDGET,
    CAP,
    CLOSE,
    FUNCTION,
    SCHEMA,
    SEEDS,
    Features,
    Output,
    asks,
)

#: Logits of two implementations of one model: log probabilities and vectors are this close.
NEAR = 1e-3
#: Features that end an output before its form is complete.
CUTS = frozenset({"token caps"})
Law = Callable[[Lab, Run], None]


def _text(run: Run, output: Output) -> str:
    """What a form is for: the text behind the reasoning."""
    tokens, tokenizer = output.tokens, run.cores[0].tokenizer
    assert tokenizer is not None
    if "reasoning" in run.features:
        index = next(i for i in range(len(tokens)) if tokens[i : i + len(CLOSE)] == CLOSE)
        tokens = tokens[index + len(CLOSE) :]
    return tokenizer.decode(tokens)


def _asked(run: Run) -> dict[tuple[int, int], Output]:
    return {key: output for key, output in run.outputs.items() if asks(key[0])}


def grammar(lab: Lab, run: Run) -> None:
    """The answer is a document of the schema."""
    for output in _asked(run).values():
        text = _text(run, output)
        if output.finish_reason == "stop" and "<tool_call>" not in text:
            _check_document(json.loads(text))
        else:
            assert "<tool_call>" in text or (CUTS & run.features and "{".startswith(text[:1]))


def _check_document(document: dict[str, object]) -> None:
    properties = SCHEMA["properties"]
    assert document.keys() == properties.keys()
    assert all(value in properties[name]["enum"] for name, value in document.items())


def tools(lab: Lab, run: Run) -> None:
    """Calls are complete, and the same from deltas of one token as from the whole text."""
    plan = OutputParserConfig(
        tools=lambda: HermesParser([FUNCTION]), forced_tool="grammar" not in run.features
    )
    for output in _asked(run).values():
        text = _text(run, output)
        chunks, full = OutputParser(plan), OutputParser(plan)
        parts = [part for chunk in text for part in chunks.push(chunk)]
        parts += chunks.push("", is_final=True)
        once = full.push(text, is_final=True)
        joined = [
            "".join(p.text for p in parts if p.kind == "arguments") for parts in (parts, once)
        ]
        assert joined[0] == joined[1]
        if chunks.num_calls and output.finish_reason == "stop":
            assert [part.text for part in parts if part.kind == "call"] == [FUNCTION.name]
            _check_document(json.loads(joined[0]))
        else:
            assert CUTS & run.features or "grammar" in run.features


def reasoning(lab: Lab, run: Run) -> None:
    """It is closed by its budget at the latest."""
    for output in _asked(run).values():
        ends = [
            index
            for index in range(len(output.tokens))
            if output.tokens[index : index + 2] == CLOSE
        ]
        assert ends
        assert ends[0] <= BUDGET


def logprobs(lab: Lab, run: Run) -> None:
    """They are what the model says of the same tokens in a prompt, and asking changes no token."""
    baseline_output = lab.result(run.features - {"logprobs"})
    for key, output in run.outputs.items():
        assert output.words == baseline_output.outputs[key].words
        if asks(key[0]):
            assert len(output.logprobs) == len(output.tokens)
            expected_logprobs = _score_tokens(lab, run, key[0], output.tokens, 3)
            for mine, other in zip(output.logprobs, expected_logprobs, strict=True):
                assert mine.token_ids[0] == other.token_ids[0]
                _equal_or_near(run, mine, other)


def _equal_or_near(run: Run, mine: TokenLogprobs, other: TokenLogprobs) -> None:
    # A search has a softmax of its own, of edited logits.
    if "beams" in run.features or {"states", "bridge"} <= run.features:
        assert math.isclose(mine.logprobs[0], other.logprobs[0], abs_tol=NEAR)
    else:
        assert mine == other


def _score_tokens(
    lab: Lab, run: Run, number: int, tokens: list[int], count: int
) -> list[TokenLogprobs]:
    """What the same engine says of tokens that come in a prompt."""
    asked = lab.requests(run.features)[number]
    message = msgspec.structs.replace(
        asked, prompt_token_ids=[*asked.prompt_token_ids, *tokens], token_cap=None,
        request_id="told-0", sampling=SamplingParams(max_tokens=1, prompt_logprobs=count),
    )  # fmt: skip
    core = run.cores[0]
    core.add_request(message)
    prompt_logprobs: list[TokenLogprobs | None] = []
    while core.has_work:
        for delta in core.step():
            assert delta.error is None
            prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
    entries = prompt_logprobs[len(asked.prompt_token_ids) :]
    return [entry for entry in entries if entry is not None]


def several(lab: Lab, run: Run) -> None:
    """Each output is what a request of its own with its seed gets."""
    single = run.features - {"n > 1"}
    if "beams" in run.features:
        assert {len([k for k in run.outputs if k[0] == n]) for n in (0, 2, 4)} == {3}
        return
    for picked in ({0: 0, 2: 0, 4: 0}, {0: 2, 2: 2, 4: 1}):
        isolated_output = lab.run(
            single,
            [_seeded(lab, single, *number_and_prompt) for number_and_prompt in picked.items()],
        )
        for number, index in picked.items():
            mine, other = run.outputs[number, index], isolated_output.outputs[number, 0]
            if "token caps" in run.features:  # of all outputs together
                assert other.tokens[: len(mine.tokens)] == mine.tokens
            else:
                assert same(run.features, mine, other)


def _seeded(lab: Lab, features: Features, number: int, index: int) -> EngineRequest:
    """A request for what is another's output of that number."""
    asked = lab.requests(features)[number]
    seed = (SEEDS.get(number, 0) + 0x9E3779B97F4A7C15 * index) % 2**64
    sampling = msgspec.structs.replace(asked.sampling, seed=seed)
    return msgspec.structs.replace(asked, sampling=sampling)


def beams(lab: Lab, run: Run) -> None:
    """Outputs differ, come best first, and their scores are the model's own."""
    for number in (0, 2, 4):
        outputs = [output for key, output in sorted(run.outputs.items()) if key[0] == number]
        assert len({tuple(output.tokens) for output in outputs}) == len(outputs) > 1
        scores = [(output.total or 0.0) / len(output.tokens) for output in outputs]
        assert scores == sorted(scores, reverse=True)
        for output in outputs:
            scored = _score_tokens(lab, run, number, output.tokens, 0)
            total = sum(entry.logprobs[0] for entry in scored)
            assert math.isclose(total, output.total or 0.0, abs_tol=NEAR)


def caps(lab: Lab, run: Run) -> None:
    """All outputs of a request end at its token, and up to there they are as without a cap."""
    free = lab.result(run.features - CUTS)
    for number in (0, 2, 4):
        outputs = {key: output for key, output in run.outputs.items() if key[0] == number}
        size = sum(len(output.tokens) for output in outputs.values())
        if "beams" in run.features:
            assert size <= CAP
            assert {output.finish_reason for output in outputs.values()} <= {"budget", "stop"}
            continue
        finished = all(output.finish_reason != "budget" for output in outputs.values())
        assert size == CAP or (finished and size < CAP)
        for key, output in outputs.items():
            assert free.outputs[key].tokens[: len(output.tokens)] == output.tokens


def quantized(lab: Lab, run: Run) -> None:
    """Layers were rounded, and results don't depend on neighbours."""
    wide = lab.core(run.features - {"quantized weights"})
    assert run.cores[0].facts.decode_bytes < wide.facts.decode_bytes / 2
    _check_isolated(lab, run)


def narrow(lab: Lab, run: Run) -> None:
    """Keys take a byte each, and results don't depend on neighbours."""
    wide = lab.core(run.features - {"narrow caches"})
    assert run.cores[0].capacity.kv_bytes_per_token < wide.capacity.kv_bytes_per_token / 2
    _check_isolated(lab, run)


def windows(lab: Lab, run: Run) -> None:
    """Blocks behind the window are given back, and results don't depend on neighbours."""
    assert any(group.window for group in run.cores[0].capacity.layout.groups)
    _check_isolated(lab, run)


def states(lab: Lab, run: Run) -> None:
    """Results don't depend on neighbours."""
    assert run.cores[0].facts.stateful
    _check_isolated(lab, run)


def bridge(lab: Lab, run: Run) -> None:
    """`transformers`' own modules say the same as the native decoder."""
    native = lab.result(run.features - {"bridge"})
    assert run.cores[0].facts.architecture == native.cores[0].facts.architecture
    if "quantized weights" in run.features:  # of which the two round other layers
        _check_isolated(lab, run)
        return
    for key, output in native.outputs.items():
        assert run.outputs[key].words == output.words
        _near(run.outputs[key].pooled, output.pooled)


def _near(mine: bytes | None, other: bytes | None) -> None:
    assert (mine is None) == (other is None)
    if mine is not None and other is not None:
        pairs = zip(memoryview(mine).cast("f"), memoryview(other).cast("f"), strict=True)
        assert all(math.isclose(a, b, abs_tol=NEAR) for a, b in pairs)


def pooling(lab: Lab, run: Run) -> None:
    """Each prompt has a vector of length 1, the same alone."""
    for output in run.outputs.values():
        values = memoryview(output.pooled or b"").cast("f")
        assert math.isclose(sum(value * value for value in values), 1.0, abs_tol=NEAR)
    _check_isolated(lab, run)


def adapters(lab: Lab, run: Run) -> None:
    """They say what the merged model says; their neighbours what the model says alone."""
    base = lab.result(run.features - {"adapters"})
    unaffected = {key: output.bits for key, output in base.outputs.items() if not asks(key[0])}
    outputs = {key: output for key, output in run.outputs.items() if not asks(key[0])}
    assert {key: output.bits for key, output in outputs.items()} == unaffected
    asked = _asked(run)
    if not {"grammar", "tools"} & run.features:
        assert any(output.bits != base.outputs[key].bits for key, output in asked.items())
    if "quantized weights" in run.features:  # rounded after merging it is another model
        _check_isolated(lab, run)
        return
    merged = str(lab.checkpoints.merged(lab.kind(run.features)))
    full_output = lab.run(run.features - {"adapters"}, model=merged)
    for key, output in asked.items():
        assert output.words == full_output.outputs[key].words
        _near(output.pooled, full_output.outputs[key].pooled)


def pictures(lab: Lab, run: Run) -> None:
    """What is said depends on the picture, and not on neighbours."""
    if "disaggregated" not in run.features:  # whose pictures are seen by another engine
        assert all(core.scheduler.encoder_cache.num_queries for core in run.cores)
    _check_isolated(lab, run)
    requests = lab.requests(run.features)
    swapped = []
    for number, source in ((0, 2), (2, 4), (4, 0)):
        (item,), (other,) = requests[number].media, requests[source].media
        swapped.append(
            msgspec.structs.replace(
                requests[number],
                media=[msgspec.structs.replace(item, digest=other.digest)],
                media_data=requests[source].media_data,
            )
        )
    changed = lab.run(run.features, swapped)
    # A grammar may leave so little to choose that one answer is the same by chance.
    keys = [(number, 0) for number in (0, 2, 4)]
    assert any(changed.outputs[key].bits != run.outputs[key].bits for key in keys)


def encoded(lab: Lab, run: Run) -> None:
    """What is said depends on what the encoder reads, and not on neighbours."""
    _check_isolated(lab, run)
    requests = lab.requests(run.features)
    swapped = [
        msgspec.structs.replace(
            requests[number], media=requests[source].media, media_data=requests[source].media_data
        )
        for number, source in enumerate([1, 2, 3, 4, 5, 0])
    ]
    changed = lab.run(run.features, swapped)
    assert any(changed.outputs[key].bits != run.outputs[key].bits for key in run.outputs)


#: One that is greedy, one that doesn't ask for what the run is about, one that is drawn: the others
#: are of these kinds too.
_LOOKED_AT = (0, 3, 4)


def _check_isolated(lab: Lab, run: Run) -> None:
    """A request gets the same when nobody is beside it."""
    for number in _LOOKED_AT:
        isolated_output = lab.run_isolated(run.features, number)
        for key in (key for key in run.outputs if key[0] == number):
            assert same(run.features, isolated_output.outputs[key], run.outputs[key])


LAWS: dict[str, Law] = {
    "grammar": grammar,
    "tools": tools,
    "reasoning": reasoning,
    "logprobs": logprobs,
    "n > 1": several,
    "beams": beams,
    "token caps": caps,
    "quantized weights": quantized,
    "narrow caches": narrow,
    "windows": windows,
    "states": states,
    "bridge": bridge,
    "pooling": pooling,
    "adapters": adapters,
    "pictures": pictures,
    "videos": pictures,
    "speech": encoded,
    "encoded texts": encoded,
}


def same(features: Features, mine: Output, other: Output) -> bool:
    """Equal to the bit; where the bridge carries a state on, equal in words."""
    if {"states", "bridge"} <= features:
        return mine.words == other.words
    return mine.bits == other.bits
