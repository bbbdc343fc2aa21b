"""Where drafts come from, and whose texts they may come from."""

from __future__ import annotations

import pytest

from engine.contract.lora import AdapterRef
from engine.contract.messages import EngineRequest
from engine.contract.speculative_config import SpeculativeConfig
from engine.scheduler import Request, Sequence
from engine.speculative import ngram as proposers
from engine.speculative.ngram import MultiTextNgramIndex, NgramProposer, SuffixProposer

CONFIG = SpeculativeConfig(method="suffix", prompt_lookup_min=2, prompt_lookup_max=3)


def sequence(
    prompt: list[int],
    output: list[int],
    seq_id: int = 0,
    namespace: str = "",
    adapter: AdapterRef | None = None,
    tenant: str = "default",
) -> Sequence:
    message = EngineRequest(
        request_id="r",
        gateway_id="g",
        prompt_token_ids=prompt,
        cache_namespace=namespace,
        adapter=adapter,
        tenant=tenant,
    )
    return Sequence(
        seq_id=seq_id,
        request=Request(message),
        index=0,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        max_output_tokens=100,
        seed=0,
    )


def test_what_followed_in_the_prompt_is_proposed() -> None:
    proposer = NgramProposer(CONFIG)
    local_sequence = sequence([1, 2, 3, 4, 5, 9], [1, 2])
    assert proposer.propose(local_sequence, 2).tokens == [3, 4]
    local_sequence.token_ids += [3, 7]
    assert proposer.propose(local_sequence, 2).tokens == []
    local_sequence.token_ids += [1, 2]
    assert proposer.propose(local_sequence, 2).tokens == [3, 7]


def test_earlier_outputs_of_the_same_tenant_are_proposed() -> None:
    proposer = SuffixProposer(CONFIG)
    proposer.forget(sequence([50], [1, 2, 3, 4, 5], namespace="a"))
    assert proposer.propose(sequence([60], [1, 2], 1, "a"), 3).tokens == [3, 4, 5]


def test_prompts_are_not_kept() -> None:
    proposer = SuffixProposer(CONFIG)
    proposer.forget(sequence([1, 2, 3, 4], [7, 7, 7], namespace="a"))
    assert proposer.propose(sequence([60], [1, 2], 1, "a"), 3).tokens == []


def test_nobody_meets_anothers_outputs() -> None:
    proposer = SuffixProposer(CONFIG)
    adapter = AdapterRef(digest="d" * 64)
    proposer.forget(sequence([50], [1, 2, 3, 4, 5], namespace="a"))
    for namespace, adapter_ref in (("b", None), ("", None), ("a", adapter)):
        stranger = sequence([60], [1, 2], 1, namespace, adapter_ref)
        assert proposer.propose(stranger, 3).tokens == [], namespace


def test_a_right_guess_at_anothers_output_is_looked_up_as_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time tells whatever work tells: there are as many looks into tables, and as large ones."""
    probes: list[tuple[int, int]] = []
    find = MultiTextNgramIndex.find

    def counted(self: MultiTextNgramIndex, newest: list[int]) -> object:
        probes.append((len(newest), sum(map(len, self._after.values()))))
        return find(self, newest)

    monkeypatch.setattr(MultiTextNgramIndex, "find", counted)
    work = []
    for secret in ([1, 2, 3, 4, 5], [91, 92, 93, 94, 95]):
        proposer = SuffixProposer(CONFIG)
        proposer.forget(sequence([50], [70, 71, 72, 73], namespace="own"))
        proposer.forget(sequence([50], secret, namespace="victim"))
        guessing, tokens = sequence([60], [1, 2], 1, "own"), []
        for token in (3, 4, 70, 71):
            tokens.append(proposer.propose(guessing, 2).tokens)
            guessing.token_ids.append(token)
        tokens.append(proposer.propose(guessing, 2).tokens)
        work.append((tokens, probes.copy()))
        probes.clear()
    assert work[0] == work[1]
    assert work[0][0][-1] == [72, 73]


def test_outputs_that_were_dropped_before_anybody_looked_leave_nothing() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=1)
    proposer = SuffixProposer(config)
    proposer.forget(sequence([50], [1, 2, 3, 4], namespace="a"))
    proposer.forget(sequence([50], [5, 6, 7, 8], namespace="a"))
    assert proposer.propose(sequence([60], [1, 2], 1, "a"), 2).tokens == []
    assert proposer.propose(sequence([60], [5, 6], 1, "a"), 2).tokens == [7, 8]


def test_what_a_newer_output_says_too_outlives_the_older_one() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=2)
    proposer = SuffixProposer(config)
    for output in ([1, 2, 3], [1, 2, 4], [8, 8, 9]):
        proposer.forget(sequence([50], output, namespace="a"))
        assert proposer.propose(sequence([60], [output[0]], 1, "a"), 1).tokens
    assert proposer.propose(sequence([60], [1, 2], 1, "a"), 1).tokens == [4]


def test_a_namespace_is_no_other_with_a_digest_behind_it() -> None:
    proposer = SuffixProposer(CONFIG)
    proposer.forget(sequence([50], [1, 2, 3], namespace="a", adapter=AdapterRef(digest="bc")))
    assert proposer.propose(sequence([60], [1, 2], 1, "abc"), 3).tokens == []


def test_the_oldest_outputs_are_forgotten_first() -> None:
    config = SpeculativeConfig(
        method="suffix", prompt_lookup_min=2, suffix_decoding_max_cached_requests=2
    )
    proposer = SuffixProposer(config)
    for number in range(3):
        proposer.forget(sequence([50], [10 * number + 1, 10 * number + 2, 99], namespace="a"))
    assert proposer.propose(sequence([60], [1, 2], 1, "a"), 1).tokens == []
    assert proposer.propose(sequence([60], [11, 12], 1, "a"), 1).tokens == [99]
    assert proposer.propose(sequence([60], [21, 22], 1, "a"), 1).tokens == [99]


def test_the_longest_run_wins_whoever_said_it() -> None:
    proposer = SuffixProposer(CONFIG)
    proposer.forget(sequence([50], [1, 2, 3, 8, 8], namespace="a"))
    local_sequence = sequence([2, 3, 9, 5], [1, 2, 3], 1, "a")
    assert proposer.propose(local_sequence, 2).tokens == [8, 8]


def test_outputs_are_kept_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "MAX_TOKENS", 10)
    proposer = SuffixProposer(CONFIG)
    for first in (1, 11, 21):
        proposer.forget(sequence([50], [first, first + 1, 90, 91], namespace=f"of {first}"))
    registered_tokens = [
        proposer.propose(sequence([60], [first, first + 1], first, f"of {first}"), 1).tokens
        for first in (1, 11, 21)
    ]
    assert registered_tokens == [[], [90], [90]]
    proposer.forget(sequence([50], list(range(100, 120)), namespace="too long"))
    assert not proposer._outputs
    assert not proposer._history
    assert proposer._size == 0


def test_long_sequences_that_run_forget_what_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "MAX_TOKENS", 12)
    proposer = NgramProposer(CONFIG)
    long, short = sequence([1, 2, 3, 4, 5, 6, 7], [1, 2]), sequence([8, 9, 7], [8, 9], 1)
    assert proposer.propose(long, 2).tokens == [3, 4]
    assert proposer.propose(short, 1).tokens == [7]
    assert proposer.propose(long, 2).tokens == []
    long.token_ids += [6, 6, 1, 2]
    assert proposer.propose(long, 1).tokens == [6]
    long.token_ids += [9, 1, 2]
    assert proposer.propose(long, 1).tokens == [9]
    for past in (long, short):
        proposer.forget(past)
    assert proposer._size == 0
