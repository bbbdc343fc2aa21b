"""Defaults that a model folder brings."""

from __future__ import annotations

import json

import pytest

from engine.errors import ModelLoadError
from engine.text.generation_defaults import GenerationDefaults, read_generation_defaults


def write(folder, name, **values):
    (folder / name).write_text(json.dumps(values))


def test_reads_sampling_fields_that_differ_from_the_defaults(tmp_path):
    write(
        tmp_path,
        "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_p=1.0,
        top_k=20,
        max_new_tokens=64,
        min_p=None,
        transformers_version="9",
    )
    got = read_generation_defaults(tmp_path).sampling
    assert got == {"temperature": 0.6, "top_k": 20, "max_tokens": 64}


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([3, 4], 9, 3, [3, 4]),
        ([3, 4], 9, 5, [5, 3, 4]),
        (7, 9, None, [7]),
        (None, [9, 8], None, [9, 8]),
        (None, None, 2, [2]),
        (0, None, None, [0]),
        (None, None, None, []),
    ],
)
def test_every_id_that_ends_an_output(tmp_path, generation, config, tokenizer, expected):
    write(tmp_path, "generation_config.json", eos_token_id=generation)
    write(tmp_path, "config.json", eos_token_id=config)
    assert read_generation_defaults(tmp_path, tokenizer).eos_token_ids == expected


def test_an_empty_folder_says_nothing(tmp_path):
    assert read_generation_defaults(tmp_path) == GenerationDefaults([], {})


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"top_p": "x"}, {"eos_token_id": "x"}, {"eos_token_id": [-1]}]
)
def test_bad_values_name_the_file(tmp_path, values):
    write(tmp_path, "generation_config.json", **values)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path)
