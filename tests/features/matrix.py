"""The features, and what becomes of two of them together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engine.contract.errors import QuireError
from tests.features.at_work import AT_WORK
from tests.features.lab import Lab, Run
from tests.features.laws import LAWS, same
from tests.features.workload import Features

NAMES = (
    *("prefix cache", "chunks", "preemption", "failover", "grammar", "tools", "reasoning"),
    *("logprobs", "n > 1", "beams", "token caps", "quantized weights", "narrow caches", "windows"),
    *("states", "bridge", "pooling", "sleep", "async scheduling", "several replicas", "adapters"),
    *("speculation", "draft model", "heads", "pictures", "tier", "disaggregated"),
    *("ranks", "speech", "encoded texts", "videos"),
)
PAIRS = tuple(itertools.combinations(NAMES, 2))
#: What can't meet, though nobody refuses it.
NEVER = {
    frozenset({"windows", "pictures"}): "Gemma 3 alone has both, and tests of its own",
    frozenset({"states", "pictures"}): "no architecture that runs here has both",
    frozenset({"windows", "speech"}): "no architecture that runs here has both",
    frozenset({"states", "speech"}): "no architecture that runs here has both",
    frozenset({"pictures", "speech"}): "no architecture that runs here has both",
    frozenset({"windows", "encoded texts"}): "no architecture that runs here has both",
    frozenset({"states", "encoded texts"}): "no architecture that runs here has both",
    frozenset({"pictures", "encoded texts"}): "no architecture that runs here has both",
    frozenset({"speech", "encoded texts"}): "no architecture that runs here has both",
    **{
        frozenset({name, "videos"}): "no architecture that runs here has both"
        for name in ("windows", "states", "speech", "encoded texts")
    },
    frozenset({"pictures", "videos"}): "not in one request here: Qwen2-VL has tests of its own",
    frozenset({"pooling", "disaggregated"}): "a prompt without an answer is computed once",
    frozenset({"speculation", "draft model"}): "an engine has one source of drafts",
    frozenset({"speculation", "heads"}): "an engine has one source of drafts",
    frozenset({"draft model", "heads"}): "an engine has one source of drafts",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pair went: it passes, or a reason why it can't be had."""

    reason: str = ""


def outcome(lab: Lab, first: str, second: str) -> Outcome:
    """Run the two together. Raises `AssertionError` where they break each other."""
    try:
        return _outcome(lab, frozenset({first, second}))
    finally:
        lab.end_ranks()


def _outcome(lab: Lab, features: Features) -> Outcome:
    if features in NEVER:
        return Outcome(NEVER[features])
    try:
        run = lab.result(features)
    except QuireError as error:
        return Outcome(error.message.split(" Known:")[0])
    if reason := _not_at_work(run, features):
        return Outcome(reason)
    transparent = features & AT_WORK.keys()
    if transparent:
        without = lab.result(features - transparent)
        assert without.outputs.keys() == run.outputs.keys()
        for key, output in without.outputs.items():
            assert same(features, run.outputs[key], output), key
    for feature in sorted(features & LAWS.keys()):
        LAWS[feature](lab, run)
    return Outcome()


def _not_at_work(run: Run, features: Features) -> str:
    """Why a feature did nothing, in the engine's own words. Raises where it has none."""
    for feature in sorted(features & AT_WORK.keys()):
        if AT_WORK[feature](run):
            continue
        reasons = {output.flight.cold_reason for output in run.outputs.values()}
        if feature == "prefix cache" and reasons == {"caching_off"}:
            return "nothing is cached (the flight record's `cold_reason` is `caching_off`)"
        raise AssertionError(f"{feature} did nothing")
    return ""
