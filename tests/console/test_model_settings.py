"""The form of a model's settings: all of the engine's options, checked by its own rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from django.http import QueryDict

from catalog.cli import NAMED
from console.views.model_forms import GROUPS, PREFIX, SettingsForm
from engine.contract.engine_config import EngineConfig


def sent(**fields: str | list[str]) -> QueryDict:
    data = QueryDict(mutable=True)
    for name, value in fields.items():
        key = PREFIX + name.replace("__", ".")
        data.setlist(key, value if isinstance(value, list) else [value])
    return data


def test_every_option_of_the_engine_stands_in_one_group() -> None:
    named = [name for _, names in GROUPS for name in names.split()]
    options = {spec.name for spec in dataclasses.fields(EngineConfig)} - NAMED
    assert sorted(named) == sorted(options)
    form = SettingsForm()
    assert [group.title for group in form.groups] == [title for title, _ in GROUPS]
    assert all(option.help for option in form.options.values())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_model_len": 4096, "quantization": "int4", "enable_lora": False, "block_size": 32},
    {"cpu_kvcache_space": 0.5, "async_scheduling": True, "cudagraph_capture_sizes": [1, 2, 8]},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    {"hf_overrides": {"text_config": {"rope_theta": 1e4, "name": "x"}, "flag": True, "s": "12a"}},
    {"logits_processors": ["json:JSONEncoder", "json:JSONDecoder"]},
    {"hf_overrides": {"as_text": "12", "none": None, "list": [1, "two"]}},
]


@pytest.mark.parametrize("values", SETTINGS)
def test_what_is_shown_and_sent_back_is_what_it_was(values: dict[str, Any]) -> None:
    form = SettingsForm(values)
    data = QueryDict(mutable=True)
    for name, option in form.options.items():
        if option.kind == "pairs":
            data.setlist(f"{PREFIX}{name}.key", [key for key, _ in option.pairs])
            data.setlist(f"{PREFIX}{name}.value", [value for _, value in option.pairs])
        else:
            data[PREFIX + name] = option.value
    again = SettingsForm()
    assert again.read(data) == values
    assert not again.has_errors
    assert sum(group.num_set for group in form.groups) == len(values)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_model_len", "0", "at least 1"),
        ("max_model_len", "many", "whole number"),
        ("kept_seats_fraction", "0.9", "[0.0, 0.5]"),
        ("block_size", "17", "one of 4, 8"),
        ("enable_lora", "perhaps", "Choose on, off"),
        ("load_format", "gguf", "one of"),
        ("device", "quantum", "quantum"),
        ("cudagraph_capture_sizes", "1, x", "whole number"),
        ("logits_processors", "nowhere", "module:Class"),
        ("speculative_config__key", "nonsense", "method"),
        ("reasoning_parser", "nobody", "There are: none, "),
        ("tool_call_parser", "nobody", "hermes"),
    ],
)
def test_an_error_stands_at_its_field(field: str, value: str, text: str) -> None:
    form = SettingsForm()
    more = {"speculative_config__value": "1"} if field.startswith("spec") else {}
    form.read(sent(**{field: value}, **more))
    invalid_errors = {name: option.error for name, option in form.options.items() if option.error}
    assert list(invalid_errors) == [field.partition("__")[0]]
    assert text in invalid_errors[field.partition("__")[0]]


def test_what_no_single_field_can_know_stands_at_the_one_that_the_engine_names() -> None:
    form = SettingsForm()
    form.read(sent(enable_chunked_prefill="off", max_num_batched_tokens="64", max_model_len="128"))
    assert "at least max_model_len" in form.options["max_num_batched_tokens"].error


def test_a_name_given_twice_or_not_at_all_is_refused() -> None:
    form = SettingsForm()
    form.read(sent(hf_overrides__key=["a", "a.b"], hf_overrides__value=["1", "2"]))
    assert "given twice" in form.options["hf_overrides"].error
    form = SettingsForm()
    form.read(sent(rope_scaling__key=[""], rope_scaling__value=["2"]))
    assert "has no name" in form.options["rope_scaling"].error
