"""Whisper in CTranslate2's layout is the same model; files that aren't sound are refused."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.checkpoints.ctranslate2 import CTranslate2File, CTranslate2Weights, ctranslate2_folder
from engine.contract.errors import ModelLoadError
from tests.engine.speech.models import START, expected, make_whisper, sound, write_ctranslate2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_whisper(tmp_path_factory.mktemp("transformers"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def test_every_weight_has_its_name_and_value(model: Any, tmp_path: Path) -> None:
    tolerances = {"float32": 0.0, "float16": 1e-3, "int8": 1e-2}
    for kind, tolerance in tolerances.items():
        folder = tmp_path / kind
        write_ctranslate2(model, folder, kind)
        weights = CTranslate2Weights(folder)
        for name, tensor in model.state_dict().items():
            if name == "proj_out.weight":
                continue
            read = weights.get(name, tuple(tensor.shape))
            torch.testing.assert_close(read.float(), tensor, atol=tolerance, rtol=tolerance)
        assert not weights.unused_names()


def test_tokens_are_those_of_the_original(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    write_ctranslate2(model, folder)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    prompt = {"prompt_token_ids": [START], "multi_modal_data": {"audio": sound(4)}}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [result] = llm.generate(prompt, params)
    assert list(result.outputs[0].token_ids) == expected(model, sound(4), [START], 12)


def test_the_folder_is_made_once_and_again_when_the_file_changes(
    model: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "whisper"
    write_ctranslate2(model, folder)
    first = ctranslate2_folder(folder)
    assert ctranslate2_folder(folder) == first
    write_ctranslate2(model, folder, "float16")
    assert ctranslate2_folder(folder) != first


def test_a_folder_without_a_tokenizer_says_so(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    write_ctranslate2(model, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        ctranslate2_folder(folder)


def test_truncated_and_damaged_files_are_refused_before_memory_is_taken(
    model: Any, tmp_path: Path
) -> None:
    write_ctranslate2(model, tmp_path / "whisper")
    data = (tmp_path / "whisper" / "model.bin").read_bytes()
    path = tmp_path / "model.bin"
    random = np.random.default_rng(1)
    cuts = [0, 1, 4, 5, 9, 20, 25, 40, len(data) - 1, *random.integers(30, len(data), 30).tolist()]
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelLoadError):
            CTranslate2File(path)
    path.write_bytes(data + b"more")
    with pytest.raises(ModelLoadError, match="follow"):
        CTranslate2File(path)
    for position, value in ((0, 99), (18, 1 << 31), (22, 0xFFFFFFFF)):
        damaged = bytearray(data)
        struct.pack_into("<I", damaged, position, value)
        path.write_bytes(damaged)
        if position == 18:  # the revision, which says nothing here
            continue
        with pytest.raises(ModelLoadError):
            CTranslate2File(path)
    path.write_bytes(data.replace(b"WhisperSpec", b"WhiskersSpe"))
    with pytest.raises(ModelLoadError, match="WhisperSpec"):
        CTranslate2File(path)


def test_sizes_that_do_not_belong_together_are_refused(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    write_ctranslate2(model, folder)
    weights = CTranslate2Weights(folder)
    with pytest.raises(ModelLoadError, match="asks for"):
        weights.get("model.decoder.layers.0.fc1.weight", (1, 2))
    with pytest.raises(ModelLoadError, match="has no"):
        weights.get("model.decoder.layers.9.fc1.weight", (1, 2))
    shutil.copytree(folder, tmp_path / "other")
    data = (folder / "model.bin").read_bytes()
    (tmp_path / "other" / "model.bin").write_bytes(
        data.replace(b"encoder/num_heads", b"encoder/num_hexds")
    )
    with pytest.raises(ModelLoadError, match="num_heads"):
        ctranslate2_folder(tmp_path / "other")
