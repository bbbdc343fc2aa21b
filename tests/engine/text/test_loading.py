"""Folders that can't be loaded say which file is wrong; a folder's own code is never run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from engine.contract.errors import ModelLoadError
from engine.text.tokenizer import load_tokenizer
from engine.text.tokenizer_folder import convert_tokenizer
from tests.engine.text import folders

EVIL = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast as Evil
Path({ran!r}).touch()
"""


@pytest.fixture
def folder(tmp_path):
    return folders.save(tmp_path / "model", folders.byte_level(), folders.CHATML_CONFIG)


def refused(path, *words):
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(str(path))
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.status == 400


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no folder")


def test_no_tokenizer_json(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "tokenizer.json", "missing")
    (folder / "tokenizer.model").write_bytes(b"\x00")
    refused(folder, "tokenizer.json", "tokenizer.model is there")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "isn't valid JSON"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "no tokenizer"),
        ("tokenizer.json", "[" * 100_000, "isn't valid JSON"),
        ("tokenizer_config.json", "{'single': 1}", "isn't valid JSON"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "malformed"),
        ("tokenizer_config.json", '{"eos_token": {"text": 1}}', "malformed"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "malformed"),
        ("special_tokens_map.json", "nope", "isn't valid JSON"),
        ("chat_template.json", "nope", "isn't valid JSON"),
    ],
)
def test_broken_files_are_named(folder, name, content, words):
    (folder / name).write_text(content)
    refused(folder, name, words)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_are_no_utf8_are_named(folder, name):
    (folder / name).write_bytes(b"\xff\xfe\xff")
    refused(folder, name, "can't be read")


def test_old_folders_name_special_tokens_in_their_own_file(tmp_path):
    folder = folders.save(tmp_path, folders.byte_level(), {})
    tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<|endoftext|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == tokenizer.piece_to_id("<|im_end|>")
    assert tokenizer.bos_token_id == tokenizer.piece_to_id("<|endoftext|>")


def test_template_files_win_over_the_config(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    assert load_tokenizer(folder).chat_template == "old"
    (folder / "chat_template.json").write_text('{"chat_template": "legacy file"}')
    assert load_tokenizer(folder).chat_template == "legacy file"
    (folder / "chat_template.jinja").write_text("newest")
    assert load_tokenizer(folder).chat_template == "newest"


def bring_code(folder):
    """Give the folder a tokenizer class of its own that leaves a file when imported."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"auto_map": config["auto_map"]}))
    (folder / "evil.py").write_text(EVIL.format(ran=str(folder / "ran")))


@pytest.mark.parametrize("trust", [False, True])
def test_fault_41_a_folders_code_isnt_imported_to_load(folder, trust):
    bring_code(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    assert tokenizer.decode(tokenizer.encode("safe")) == "safe"
    assert not (folder / "ran").exists()


def test_fault_41_a_folders_code_isnt_imported_to_convert(folder, tmp_path):
    bring_code(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError):
        convert_tokenizer(folder, tmp_path / "converted")
    assert not (folder / "ran").exists()


@pytest.mark.system
def test_a_folders_code_is_run_to_convert_when_trusted(folder, tmp_path):
    bring_code(folder)
    (folder / "tokenizer.json").unlink()
    code = (  # in a process of its own: such code stays registered in the library
        "from engine.text.tokenizer_folder import convert_tokenizer\n"
        "from engine.contract.errors import ModelLoadError\n"
        f"try: convert_tokenizer({str(folder)!r}, 'out', trust_remote_code=True)\n"
        "except ModelLoadError: pass"  # it runs, but finds no tokenizer's files
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (folder / "ran").exists()


def test_an_older_tokenizers_files_are_converted(tmp_path):
    source, converted = tmp_path / "source", tmp_path / "converted"
    original = load_tokenizer(
        folders.save(tmp_path / "full", folders.byte_level(), folders.CHATML_CONFIG)
    )
    source.mkdir()
    model = json.loads((tmp_path / "full" / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (source / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    config = {"tokenizer_class": "GPT2Tokenizer", **folders.CHATML_CONFIG}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    refused(source, "vocab.json is there")
    tokenizer = convert_tokenizer(source, converted)
    text = "Hello, world! 東京"
    assert tokenizer.encode(text) == original.encode(text)
    shutil.rmtree(source)
    assert load_tokenizer(converted).encode(text) == original.encode(text)


def test_a_folder_without_any_tokenizer_cant_be_converted(tmp_path):
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        convert_tokenizer(tmp_path, tmp_path / "converted")
