"""Weights in each format give the same tokens; unsound files are refused, and none is run."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorizer import TensorSerializer

from engine import LLM, SamplingParams
from engine.checkpoints.convert_torch import read_tensors
from engine.checkpoints.torch_files import converted_files, read_npcache, read_pt
from engine.contract.checkpoint_options import LOAD_FORMATS, SAME_FORMATS
from engine.contract.engine_config import EngineConfig, add_cli_args
from engine.contract.errors import ConfigError, InvalidRequest, ModelLoadError

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
ROOT = Path(__file__).resolve().parents[2]


def answer(folder: Path, **settings: Any) -> list[int]:
    llm = LLM(str(folder), **SMALL, **settings)
    return llm.generate("the quick brown fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def source(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("llama")


@pytest.fixture(scope="module")
def expected(source: Path) -> list[int]:
    return answer(source)


@pytest.fixture
def bare(source: Path, tmp_path: Path) -> Path:
    """The model's folder without its weights."""
    folder = tmp_path / "bare"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


def tensors(source: Path) -> dict[str, torch.Tensor]:
    return load_file(source / "model.safetensors")


def write_pt(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Two files and their index, as the hub has them."""
    stored = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors(source).items()}
    names = sorted(stored)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: stored[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save({"lr": 1.0}, folder / "training_args.bin")


def test_pt(source: Path, bare: Path, expected: list[int]) -> None:
    write_pt(source, bare)
    assert answer(bare, load_format="pt") == expected
    assert answer(bare) == expected
    assert answer(bare, model_impl="transformers") == expected
    with pytest.raises(ModelLoadError, match=r"neither .* For \S+\.bin give --load-format pt\."):
        answer(bare, load_format="safetensors")
    with pytest.raises(ModelLoadError, match=r"For its safetensors leave load_format out"):
        answer(source, load_format="pt")


def test_pt_of_one_file_and_of_the_old_form(source: Path, bare: Path, expected: list[int]) -> None:
    torch.save(tensors(source), bare / "model.pt", _use_new_zipfile_serialization=False)
    assert answer(bare, load_format="pt") == expected


class Evil:
    """Would leave a file behind if it were unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_no_code_in_a_file_is_run(bare: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save({"a": Evil(str(trap))}, bare / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="weights alone"):
        answer(bare)
    (bare / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(trap))))
    with pytest.raises(ValueError, match="weights alone"):
        read_tensors(bare / "pytorch_model.bin")
    assert not trap.exists()


def test_tied_tensors_are_read_and_others_of_one_memory_refused(bare: Path) -> None:
    row = torch.arange(4.0)
    torch.save({"a": row, "b": row}, bare / "pytorch_model.bin")
    assert all(torch.equal(read_pt(bare).get(name, (4,)), row) for name in "ab")
    file = bare / "pytorch_model.bin"
    torch.save({"a": row.expand(1000, 4)}, file)
    with pytest.raises(ValueError, match="'a' is no dense tensor"):
        read_tensors(file)
    large = torch.ones(10_000)
    torch.save({str(n): large for n in range(100)}, file)
    with pytest.raises(ValueError, match="would take 4000000 bytes"):
        read_tensors(file)


def test_a_converted_file_is_kept_until_it_changes(bare: Path) -> None:
    path = bare / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path)
    (first,) = converted_files([path])
    written = first.stat().st_mtime_ns
    os.utime(first.parent, (0, 0))
    assert converted_files([path]) == [first]
    assert first.stat().st_mtime_ns == written
    assert first.parent.stat().st_mtime >= path.stat().st_mtime  # of the last load
    torch.save({"a": torch.zeros(2)}, path)
    assert converted_files([path]) != [first]
    assert read_pt(bare).get("a", (2,)).tolist() == [0, 0]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04" + b"\0" * 100])
def test_a_broken_pt_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match="weights alone"):
        read_tensors(tmp_path / "a.bin")


def test_pt_files_hold_tensors_by_name(bare: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no \.bin"):
        read_pt(bare)
    for invalid in ([torch.ones(2)], {5: torch.ones(2)}, {"a": {"b": torch.ones(2)}}):
        torch.save(invalid, bare / "pytorch_model.bin")
        with pytest.raises(ValueError, match="tensors by name"):
            read_tensors(bare / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="tensors by name"):  # by way of its process
        read_pt(bare)
    index = {"weight_map": {"a": "../pytorch_model.bin"}}
    (bare / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="outside the folder"):
        read_pt(bare)


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), torch.bfloat16])
def test_npcache_is_made_once(
    source: Path, bare: Path, expected: list[int], dtype: torch.dtype | None
) -> None:
    write_pt(source, bare, dtype)
    expected_answer = answer(bare, load_format="pt")
    assert answer(bare, load_format="npcache") == expected_answer
    assert dtype is not None or expected_answer == expected
    modified_at = {path.name: path.stat().st_mtime_ns for path in (bare / "np").iterdir()}
    assert answer(bare, load_format="npcache") == expected_answer
    assert {path.name: path.stat().st_mtime_ns for path in (bare / "np").iterdir()} == modified_at
    write_pt(source, bare, torch.float16)
    read_npcache(bare)
    names = json.loads((bare / "np" / "weight_names.json").read_text())
    assert {entry["dtype"] for entry in names["tensors"].values()} == {"float16"}


def test_a_broken_npcache_is_refused(source: Path, bare: Path) -> None:
    write_pt(source, bare)
    read_npcache(bare)
    file = bare / "np" / "weight_names.json"
    names = json.loads(file.read_text())
    name, entry = next(iter(names["tensors"].items()))
    np.save(bare / "np" / entry["file"], np.array([{"an": "object"}]), allow_pickle=True)
    with pytest.raises(ModelLoadError, match="no sound"):
        read_npcache(bare)
    (bare / "np" / entry["file"]).write_bytes(b"")
    with pytest.raises(ModelLoadError, match="no sound"):
        read_npcache(bare)
    names["tensors"][name]["file"] = "../../etc/passwd"
    file.write_text(json.dumps(names))
    with pytest.raises(ModelLoadError, match="outside the folder"):
        read_npcache(bare)
    file.write_text("[]")
    assert name in read_npcache(bare)


def test_sharded_state(source: Path, tmp_path: Path, expected: list[int]) -> None:
    target = tmp_path / "sharded"
    target.mkdir()
    llm = LLM(str(source), **SMALL)
    biggest = max(tensor.nbytes for tensor in tensors(source).values())
    files = llm.llm_engine.model_executor.save_sharded_state(
        path=str(target), pattern=None, max_size=str(biggest)
    )
    assert len(files) > 2
    assert [file.name for file in files[:2]] == [
        "model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors",
    ]  # fmt: skip
    for file in source.iterdir():
        if file.suffix not in (".bin", ".pt", ".safetensors") and file.is_file():
            shutil.copy(file, target)
    assert answer(target, load_format="sharded_state") == expected
    for path, pattern, size, param in (
        ("/nowhere", None, None, "path"),
        (str(target), "../{rank}-{part}", None, "pattern"),
        (str(target), "{other}", None, "pattern"),
        (str(target), "one.safetensors", None, "pattern"),
        (str(target), None, "big", "max_size"),
        (str(target), None, 0, "max_size"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            llm.llm_engine.save_sharded_state(path, pattern, size)
        assert refusal.value.param == param


def test_sharded_state_under_another_pattern(source: Path, bare: Path, expected: list[int]) -> None:
    LLM(str(source), **SMALL).llm_engine.save_sharded_state(str(bare), "r{rank}p{part}.st")
    extra = {"pattern": "r{rank}p{part}.st"}
    settings = {"load_format": "sharded_state", "model_loader_extra_config": extra}
    assert answer(bare, **settings) == expected
    with pytest.raises(ModelLoadError, match="save_sharded_state"):
        answer(bare, load_format="sharded_state")


def test_tensorizer(source: Path, bare: Path, expected: list[int]) -> None:
    serializer = TensorSerializer(str(bare / "model.tensors"))
    serializer.write_state_dict(tensors(source))
    serializer.close()
    assert answer(bare, load_format="tensorizer") == expected
    (bare / "model.tensors").rename(bare / "other.tensors")
    with pytest.raises(ModelLoadError, match=r"There is no .*model\.tensors"):
        answer(bare, load_format="tensorizer")
    extra = {"tensorizer_uri": "other.tensors"}
    settings = {"load_format": "tensorizer", "model_loader_extra_config": extra}
    assert answer(bare, **settings) == expected
    content = bytearray((bare / "other.tensors").read_bytes())
    content[-50] ^= 255
    (bare / "other.tensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="isn't a sound tensorizer file"):
        answer(bare, **settings)


@pytest.mark.slow
def test_ranks_read_their_parts_of_any_format(
    source: Path, bare: Path, tmp_path: Path, expected: list[int]
) -> None:
    target = tmp_path / "sharded"
    shutil.copytree(bare, target)
    llm = LLM(str(source), **SMALL, tensor_parallel_size=2)
    llm.llm_engine.save_sharded_state(str(target))
    llm.core.shutdown()
    serializer = TensorSerializer(str(bare / "model.tensors"))
    serializer.write_state_dict(tensors(source))
    serializer.close()
    for folder, load_format in ((target, "sharded_state"), (bare, "tensorizer")):
        assert answer(folder, load_format=load_format, tensor_parallel_size=2) == expected


def test_weights_are_rounded_while_they_load_from_any_format(source: Path, bare: Path) -> None:
    write_pt(source, bare)
    assert answer(bare, load_format="pt", quantization="int8") == answer(
        source, quantization="int8"
    )


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        (
            {"load_format": "bitsandbytes", "quantization": "int8"},
            "load_format",
            "quantization='int8'",
        ),
        ({"load_format": "gguf"}, "load_format", "known by its name"),
        ({"load_format": "npccache"}, "load_format", "npcache"),
        ({"load_format": "zip"}, "load_format", "one of auto"),
        ({"model_loader_extra_config": {"a": "b"}}, "model_loader_extra_config", "no settings"),
        (
            {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": 5}},
            "model_loader_extra_config",
            "pattern",
        ),
    ],
)
def test_what_is_no_format_is_refused(options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**options)
    assert refusal.value.param == param
    assert words in refusal.value.message


@pytest.mark.parametrize(("name", "same"), SAME_FORMATS.items())
def test_other_readers_of_the_same_files_are_the_same(name: str, same: str) -> None:
    assert EngineConfig(load_format=name).load_format == same
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    assert parser.parse_args(["--load-format", name]).load_format == same


def test_a_bridged_model_says_what_it_reads(source: Path, bare: Path) -> None:
    write_pt(source, bare)
    with pytest.raises(ConfigError, match="natively"):
        answer(bare, load_format="pt", model_impl="transformers")


def test_the_page_names_every_format() -> None:
    page = (ROOT / "docs/models.md").read_text()
    assert all(f"| `{name}` |" in page for name in LOAD_FORMATS)
