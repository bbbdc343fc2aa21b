"""Every document that the engine finishes under a schema validates against it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from engine.contract.errors import InvalidRequest
from engine.offline.llm import LLM
from engine.offline.outputs import CompletionOutput
from tests.engine.structured.conftest import PROMPT, params
from tests.engine.structured.schemas import SCHEMAS, UNSUPPORTED


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> dict[str, list[CompletionOutput]]:
    """Each schema once greedy and once at temperature 1, in one batch."""
    expected_params = [
        params(
            seed,
            json=schema if temperature else json.dumps(schema),
            disable_any_whitespace=True,
            temperature=temperature,
            max_tokens=120,
        )
        for seed, schema in enumerate(SCHEMAS.values())
        for temperature in (0.0, 1.0)
    ]
    results = llm.generate([PROMPT] * len(expected_params), expected_params, use_tqdm=False)
    names = [name for name in SCHEMAS for _ in range(2)]
    matches: dict[str, list[CompletionOutput]] = {}
    for name, result in zip(names, results, strict=True):
        matches.setdefault(name, []).append(result.outputs[0])
    return matches


@pytest.mark.parametrize("name", SCHEMAS)
def test_finished_documents_validate(outputs: dict[str, list[CompletionOutput]], name: str) -> None:
    validator = jsonschema.validators.validator_for(
        SCHEMAS[name], default=jsonschema.Draft202012Validator
    )
    checker = validator(SCHEMAS[name], format_checker=validator.FORMAT_CHECKER)
    for output in outputs[name]:
        if output.finish_reason == "stop":
            checker.validate(json.loads(output.text))


def test_nearly_all_documents_finish(outputs: dict[str, list[CompletionOutput]]) -> None:
    reasons = [output.finish_reason for pair in outputs.values() for output in pair]
    assert reasons.count("stop") >= 0.9 * len(reasons)
    assert set(reasons) <= {"stop", "length"}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_keywords_that_cannot_be_kept_are_refused(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        llm.generate([PROMPT], params(json=UNSUPPORTED[name]), use_tqdm=False)
    assert (error.value.param, error.value.code) == ("structured_outputs", "invalid_grammar")


@pytest.mark.parametrize("options", [{}, {"whitespace_pattern": " ?"}])
def test_white_space_between_the_parts_of_json(llm: LLM, options: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 4}
    expected_params = [params(seed, json=schema, **options) for seed in range(4)]
    for result in llm.generate([PROMPT] * 4, expected_params, use_tqdm=False):
        output = result.outputs[0]
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
        assert not options or "  " not in output.text


TAG = {"structures": [{"begin": " ", "schema": {}, "end": ">"}], "triggers": [" "]}


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}},
        {"json_object": True},
        {"structural_tag": json.dumps(TAG)},
    ],
)
def test_a_model_that_would_write_white_space_for_ever_is_led_on(
    llm: LLM, form: dict[str, Any]
) -> None:
    text = llm.get_tokenizer().decode
    bias = {n: {" ": 100.0, "{": 50.0}.get(text([n]), 0.0) for n in range(384)}
    expected_params = params(temperature=0, max_tokens=120, logit_bias=bias, **form)
    new_text = llm.generate([PROMPT], [expected_params], use_tqdm=False)[0].outputs[0].text
    opened = re.match(r" ?[\[{]( *)[^ ]", new_text)  # what follows may be a string, full of spaces
    assert opened is not None
    assert len(opened[1]) == 1


def test_any_json_object(llm: LLM) -> None:
    expected_params = [
        params(seed, json_object=True, disable_any_whitespace=True) for seed in range(6)
    ]
    results = llm.generate([PROMPT] * 6, expected_params, use_tqdm=False)
    done = [r.outputs[0].text for r in results if r.outputs[0].finish_reason == "stop"]
    assert done
    assert all(isinstance(json.loads(text), dict) for text in done)


def test_disable_additional_properties_closes_objects(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    expected_params = [
        params(seed, json=schema, disable_any_whitespace=True, disable_additional_properties=True)
        for seed in range(4)
    ]
    for result in llm.generate([PROMPT] * 4, expected_params, use_tqdm=False):
        assert json.loads(result.outputs[0].text) in ({}, {"a": 1})
