"""`StructuredOutputsParams`: refused by the field's name, without the backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.contract import messages as protocol
from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.structured_output.grammar_spec import make_grammar_spec


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
BAD = [
    ({}, ""),
    ({"json": {}, "regex": "a"}, ""),
    ({"json_object": False}, ""),
    ({"json_object": 1}, "json_object"),
    ({"json": 5}, "json"),
    ({"json": "{"}, "json"),
    ({"json": "[1]"}, "json"),
    ({"json": {"a": float("nan")}}, "json"),
    ({"json": {"a": object()}}, "json"),
    ({"json": {1: 2}}, "json"),
    ({"json": {"a": "\ud800"}}, "json"),
    ({"json": {"a": 10**4000}}, "json"),
    ({"json": {"enum": ["x" * 1000] * 200}}, "json"),
    ({"json": " " * 200_000}, "json"),
    ({"regex": ""}, "regex"),
    ({"regex": b"a"}, "regex"),
    ({"regex": "\ud800"}, "regex"),
    ({"regex": "a" * 200_000}, "regex"),
    ({"choice": []}, "choice"),
    ({"choice": "yes"}, "choice"),
    ({"choice": ["a", ""]}, "choice"),
    ({"choice": ["a", 1]}, "choice"),
    ({"choice": ["a" * 5000]}, "choice"),
    ({"choice": ["a" * 4000] * 40}, "choice"),
    ({"choice": [str(i) for i in range(2000)]}, "choice"),
    ({"grammar": ""}, "grammar"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"structural_tag": json.dumps({**TAG, "triggers": ["<g"]})}, "structural_tag"),
    ({"structural_tag": json.dumps({**TAG, "structures": [{"begin": "<f>"}]})}, "structural_tag"),
    ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern"),
    (
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "whitespace_pattern",
    ),
    ({"json": {}, "disable_any_whitespace": "no"}, "disable_any_whitespace"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        StructuredOutputsParams(**fields)
    assert error.value.param == ".".join(filter(None, ("structured_outputs", param)))
    assert len(error.value.message) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"json": deep(10_000)},
        {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        {"json": deep(64)},
        {"regex": "(" * 10_000 + "a" + ")" * 10_000},
        {"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
    ],
    ids=["dict", "text", "one too deep", "regex", "grammar"],
)
def test_fault_39_what_nests_too_deep_is_refused_with_400(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="too deep") as error:
        StructuredOutputsParams(**fields)
    assert error.value.status == 400


def test_as_deep_as_allowed_is_accepted_and_travels() -> None:
    expected_params = StructuredOutputsParams(json=deep(63), disable_any_whitespace=True)
    message = protocol.EngineRequest(
        request_id="r",
        gateway_id="g",
        prompt_token_ids=[1],
        sampling=SamplingParams(structured_outputs=expected_params),
    )
    back = protocol.decode_inbox(protocol.encode(message))
    assert isinstance(back, protocol.EngineRequest)
    assert back.sampling.structured_outputs == expected_params
    assert back.sampling.clone().structured_outputs == expected_params


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidRequest, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"structured_outputs": {"regex": ""}}, SamplingParams)


def test_one_grammar_has_one_key_however_it_is_written() -> None:
    first = StructuredOutputsParams(json={"type": "string", "maxLength": 3})
    second = StructuredOutputsParams(json='{ "type": "string",\n "maxLength": 3 }')
    other = StructuredOutputsParams(json={"maxLength": 3, "type": "string"})
    assert make_grammar_spec(first).key == make_grammar_spec(second).key
    # Outputs follow the order of a schema's properties, so order makes another grammar.
    assert make_grammar_spec(first).key != make_grammar_spec(other).key


@pytest.mark.system
def test_the_parameters_load_neither_torch_nor_the_backend() -> None:
    script = (
        "import sys\n"
        "from engine.contract.structured_outputs import StructuredOutputsParams as S\n"
        "S(json={'type': 'string'})\n"
        "print({'torch', 'llguidance', 'numpy'} & set(sys.modules))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
