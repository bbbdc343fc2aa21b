"""Every field's range. A bad value names its field, whatever its type."""

from __future__ import annotations

import math

import msgspec
import pytest

from engine.contract import sampling_params as limits
from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from engine.contract.messages import EngineRequest, decode_inbox, encode
from engine.contract.sampling_params import RepetitionDetectionParams, SamplingParams

NAN, INF = math.nan, math.inf
#: Wrong for any number.
NO_NUMBERS = [
    NAN,
    INF,
    -INF,
    1e308,
    -1e308,
    True,
    False,
    "1",
    b"1",
    None,
    [],
    {},
    10**400,
    1j,
    [10**5000],
    "x" * 10**6,
]
#: Wrong for any integer.
NO_INTEGERS = [1.0, NAN, INF, True, False, "1", [], {}, 2**31, 2**63, 10**5000, -(10**5000)]
NO_FLAGS = [0, 1, None, "true", "", [], 1.0]


def refused(name, value, param=None):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == (param or name)
    assert caught.value.status == 400
    assert (param or name) in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, -0.0, 1e-6, 1, 100], [-0.1, 100.1]),
        ("top_p", [1e-9, 0.5, 1, 1.0], [0, 0.0, -0.0, -1, 1.01]),
        ("min_p", [0, -0.0, 0.5, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 0, 2.0], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 0, 2.0], [-2.1, 2.1]),
        ("repetition_penalty", [1e-6, 1, 2], [0, -0.0, -1, 2.1]),
    ],
)
def test_fault_10_numbers(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad + NO_NUMBERS:
        refused(name, value)


@pytest.mark.parametrize(
    ("name", "good", "bad", "optional"),
    [
        ("n", [1, 128], [0, -1, 129, 10**9], False),
        ("best_of", [1, 128], [0, -1, 129, 10**9], True),
        ("max_tokens", [1, 2**31 - 1], [0, -1], True),
        ("min_tokens", [0, 16], [-1, 17], False),
        ("top_k", [-1, 0, 1, 10**6], [-2], False),
        ("logprobs", [0, 5], [-1], True),
        ("prompt_logprobs", [0, 5], [-1], True),
        ("seed", [0, 2**31, 2**63 - 1], [-(2**63) - 1, 2**63, 2**64], True),
    ],
)
def test_faults_04_05_08_integers(name, good, bad, optional):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        refused(name, value)
    for value in NO_INTEGERS:
        if not (name == "seed" and value == 2**31):
            refused(name, value)
    if optional:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        refused(name, None)


@pytest.mark.parametrize(
    "name",
    [
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    ],
)
def test_flags(name):
    for value in (True, False):
        assert getattr(SamplingParams(**{name: value}), name) is value
    for value in NO_FLAGS:
        refused(name, value)


@pytest.mark.parametrize(("name", "max_items"), [("stop", 64), ("bad_words", 1024)])
def test_fault_11_strings(name, max_items):
    for value in ([], ["a"], ["\n", "a" * 4096], ["x"] * max_items, None, ["東", "e\u0301"]):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (
        [""],
        ["a", ""],
        ["a" * 4097],
        ["x"] * (max_items + 1),
        ["x"] * 10_000,
        [1],
        [None],
        [b"x"],
        ("a",),
        {"a": 1},
        {"a"},
        1,
        True,
    ):
        refused(name, value)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ["END"]
    refused("stop", "")
    refused("bad_words", "word")


def test_fault_16_lone_surrogates_are_refused_before_the_wire():
    refused("stop", ["a\ud800"])
    refused("bad_words", ["\udfff"])


@pytest.mark.parametrize(
    ("name", "max_items"), [("stop_token_ids", 1024), ("allowed_token_ids", 65536)]
)
def test_fault_09_lists_of_token_ids(name, max_items):
    for value in ([1], [0, 2**31 - 1], list(range(max_items)), None):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (
        list(range(max_items + 1)),
        [0] * 10**5,
        [-1],
        [True],
        [1.0],
        ["1"],
        [None],
        [2**31],
        [10**5000],
        [[1]],
        "12",
        5,
        (1,),
        {1: 2},
    ):
        refused(name, value)


def test_no_token_allowed_at_all_is_refused():
    refused("allowed_token_ids", [])
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == []


def test_fault_09_bad_word_ids():
    for value in ([], [[1]], [[1, 2], [3]], None):
        assert SamplingParams(bad_words_token_ids=value).bad_words_token_ids == value
    for value in ([[]], [1], [[1], []], [[-1]], [["a"]], [[True]], [(1,)], "ab", 5, [[1]] * 3073):
        refused("bad_words_token_ids", value)
    refused("bad_words_token_ids", [[1] * (limits.MAX_BAD_WORD_TOKENS + 1)])


def test_fault_09_logit_bias():
    for value in ({}, {0: -100}, {5: 100.0, 6: 0}, None):
        assert SamplingParams(logit_bias=value).logit_bias == value
    for value in (
        {-1: 1.0},
        {True: 1.0},
        {"5": 1.0},
        {1.0: 1.0},
        {2**31: 1.0},
        {1: 100.1},
        {1: -101},
        {1: NAN},
        {1: INF},
        {1: "1"},
        {1: None},
        {1: True},
        dict.fromkeys(range(4097), 0.0),
        [[1, 2]],
        "1:2",
        5,
    ):
        refused("logit_bias", value)


def test_logits_processors():
    SamplingParams(logits_processors=[lambda output, logits: logits])
    for value in (5, "f", lambda *_: 0, [5], [print, None], {}):
        refused("logits_processors", value)


def test_extra_args():
    SamplingParams(extra_args={"a": [1, 2.5, None, True, {"b": "c"}], "big": 2**64 - 1})
    endless = [0] * 5000
    for value in (5, [], {1: 2}, {"a": {2: 3}}, {"a": {1, 2}}, {"a": 2**64}, {"a": endless}):
        refused("extra_args", value)


def test_fields_that_contradict_each_other():
    with pytest.raises(InvalidRequest, match=r"best_of \(2\) must be at least n \(3\)") as caught:
        SamplingParams(n=3, best_of=2)
    assert caught.value.param == "best_of"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(min_tokens=20)  # max_tokens is 16
    assert caught.value.param == "min_tokens"
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)


def test_derived_values():
    assert SamplingParams(temperature=9e-6).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert SamplingParams(top_k=0).top_k == -1
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(max_tokens=None).output_budget(10, 100) == 90
    assert SamplingParams(max_tokens=5).output_budget(10, 100) == 5


FULL = {
    "n": 2,
    "best_of": 3,
    "temperature": 0.5,
    "top_k": 3,
    "stop": ["a", "東"],
    "stop_token_ids": [1, 2],
    "logit_bias": {5: 1.5, 70000: -2},
    "bad_words_token_ids": [[1, 2], [3]],
    "seed": 2**63 - 1,
    "include_stop_str_in_output": True,
    "extra_args": {"a": [1, {"b": None}]},
}


def test_goes_over_the_wire_whole():
    params = SamplingParams(**FULL)
    message = EngineRequest(request_id="r", gateway_id="g", prompt_token_ids=[1], sampling=params)
    assert decode_inbox(encode(message)).sampling == params


@pytest.mark.parametrize("field", [{"temperature": -1}, {"n": "x"}, {"n": 0}, {"zzz": 1}])
def test_bad_values_on_the_wire_are_refused(field):
    data = msgspec.msgpack.encode(field)
    with pytest.raises((msgspec.ValidationError, InvalidRequest)):
        msgspec.msgpack.decode(data, type=SamplingParams)


def test_a_clone_is_deep_except_for_functions():
    def processor(output, logits):
        return logits

    params = SamplingParams(**FULL, logits_processors=[processor])
    clone = params.clone()
    assert clone == params
    assert clone.logits_processors is params.logits_processors
    clone.stop.append("b")
    clone.logit_bias[9] = 1.0
    clone.extra_args["a"].append(2)
    clone.bad_words_token_ids[0].append(9)
    assert params == SamplingParams(**FULL, logits_processors=[processor])


def test_further_eos_ids_of_a_model_become_stop_ids():
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 7, 9]}, 2)
    assert params.stop_token_ids == [9, 7]
    for config in ({}, {"eos_token_id": None}, {"eos_token_id": 2}):
        baseline_sampling_params = SamplingParams()
        baseline_sampling_params.update_from_generation_config(config, 2)
        assert baseline_sampling_params.stop_token_ids is None
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": [2, 7]}, 2)
    assert ignoring.stop_token_ids is None


def against(params, prompt=10, context=100, vocab=50):
    params.check_against_model(
        vocab_size=vocab, num_prompt_tokens=prompt, max_model_len=context, max_logprobs=20
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"allowed_token_ids": [1, 50]}, "allowed_token_ids"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"bad_words_token_ids": [[1], [2, 50]]}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_faults_08_09_values_that_only_a_model_shows_wrong(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        against(SamplingParams(**fields))
    assert caught.value.param == param


def test_values_at_the_models_limits():
    against(SamplingParams(logprobs=20, stop_token_ids=[49], logit_bias={49: 1}, max_tokens=90))
    against(SamplingParams(max_tokens=None), prompt=99)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected_text"),
    [(100, None, "100"), (500, 1, "500"), (10, 101, "101")],
)
def test_fault_06_prompt_or_output_over_the_whole_context(prompt, max_tokens, expected_text):
    with pytest.raises(ContextLengthExceeded) as caught:
        against(SamplingParams(max_tokens=max_tokens), prompt=prompt)
    assert expected_text in caught.value.message
    assert "context is 100 tokens" in caught.value.message
    assert caught.value.code == "context_length_exceeded"


def test_fault_06_max_tokens_beside_a_prompt_is_a_ceiling():
    params = SamplingParams(max_tokens=100)
    against(params, prompt=99)
    assert params.output_budget(99, 100) == 1
    assert params.output_budget(10, 100) == 90


def test_named_tokens_for_log_probabilities_are_bounded():
    params = SamplingParams(logprob_token_ids=list(range(40)), logprobs=40)
    assert params.logprobs == 40
    against(params)  # whatever the model's most top ones are
    assert SamplingParams(logprob_token_ids=[3]).clone().logprob_token_ids == [3]
    for bad in ([], [3, 3], [-1], [True], list(range(129)), "3"):
        refused("logprob_token_ids", bad)
    for fields in ({"logprobs": 1}, {"use_beam_search": True}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(logprob_token_ids=[1, 2], **fields)
        assert caught.value.param == "logprob_token_ids"
    with pytest.raises(InvalidRequest):
        against(SamplingParams(logprob_token_ids=[50]))


def test_negative_seeds_are_seeds_and_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == 2**63 - 2
    assert SamplingParams(seed=-(2**63)).seed == 0


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("length_penalty", [-10, 0, 1.0, 2.5, 10], [-10.1, 11, *NO_NUMBERS]),
        ("early_stopping", [True, False, "never"], ["always", 1, 0, None, [], ""]),
        ("truncate_prompt_tokens", [None, -1, 1, 5], [0, -2, 1.0, True, "1", 2**31]),
    ],
)
def test_search_and_truncation(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        refused(name, value)


def test_a_search_returns_n_outputs_whatever_its_width():
    params = SamplingParams(use_beam_search=True, n=2, best_of=5)
    assert (params.num_sequences, params.beam_width) == (2, 5)
    assert SamplingParams(use_beam_search=True, n=3).beam_width == 3
    for value in NO_FLAGS:
        refused("use_beam_search", value)


def test_a_prompt_that_is_cut_to_the_context_leaves_room_for_the_output():
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=10).prompt_limit(64) == 54
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=None).prompt_limit(64) == 63
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=99).prompt_limit(64) == 1
    assert SamplingParams(truncate_prompt_tokens=7).prompt_limit(64) == 7
    assert SamplingParams().prompt_limit(64) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_pattern_size": 257}, "max_pattern_size"),
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
        ({"min_count": -1}, "min_count"),
    ],
)
def test_fault_10_repetition_detection_out_of_range(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        RepetitionDetectionParams(**fields)
    assert caught.value.param == f"repetition_detection.{param}"
    refused("repetition_detection", fields)


@pytest.mark.parametrize(
    ("tokens", "smallest", "largest", "count", "is_repeating"),
    [
        ([5, 5, 5], 0, 1, 3, True),
        ([5, 5], 0, 1, 3, False),
        ([9, 1, 2, 1, 2, 1, 2], 1, 2, 3, True),
        ([9, 1, 2, 1, 2, 1, 2], 3, 4, 2, False),
        ([1, 2, 1, 2, 1], 1, 2, 3, False),
        ([2, 2, 1, 2, 2, 1], 3, 3, 2, True),
        ([1, 1, 1, 1, 7], 1, 2, 2, False),
        ([1, 2, 3, 4], 0, 0, 0, False),
    ],
)
def test_circles_are_found_at_the_end_of_the_output(tokens, smallest, largest, count, is_repeating):
    params = RepetitionDetectionParams(largest, smallest, count)
    assert params.is_repeating([1, 2, 1, 2, *tokens], len(tokens)) is is_repeating


def test_fields_that_are_none_are_the_defaults_of_from_optional() -> None:
    params = SamplingParams.from_optional(temperature=None, n=2, stop=None, skip_clone=True)
    assert params == SamplingParams(n=2)
    with pytest.raises(TypeError):
        SamplingParams.from_optional(heat=1.0)
