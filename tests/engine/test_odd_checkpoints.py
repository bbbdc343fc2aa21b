"""Checkpoint folders that lie about themselves are refused by name, before anything big is made."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import BadModelConfig, ModelLoadError, QuireError
from engine.model_loader.loader import LoadedModel, load_model
from tests.engine.models import Oracle, make_model

NAME = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "m")


def load(config: EngineConfig) -> LoadedModel:
    return load_model(config, kernels.get("cpu"), lambda done, total: None)


def refused(folder: Path) -> QuireError:
    config = EngineConfig(model=str(folder), cpu_kernels=False, skip_tokenizer_init=True)
    with pytest.raises(QuireError) as error:
        load(config)
    assert len(str(error.value)) < 2000
    return error.value


def change(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("value", [-1, 1 << 31, 1 << 62, 10**400, math.inf, "x", [[]]], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_fault_40_sizes_that_cannot_be(folder: Path, name: str, value: Any) -> None:
    refused(change(folder, **{name: value}))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "CohereForCausalLM", "QuuxModel"])
@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**15},
        {"num_hidden_layers": str(10**15)},
        {"n_layer": 10**15},
        {"vocab_size": 10**12},
        {"hidden_size": 1 << 30},
        {"num_experts": 10**9},
        {"text_config": {"n_routed_experts": 10**9}},
        {"vision_config": {"depth": 10**15}},
        {"audio_config": {"encoder_layers": 10**15}},
    ],
    ids=str,
)
def test_sizes_beyond_any_models_are_named_before_anything_is_made(
    folder: Path, architecture: str, config: dict[str, Any]
) -> None:
    name, value = next(iter(config.items()))
    if isinstance(value, dict):
        [name] = value
    for overrides in (None, config):
        change(folder, architectures=[architecture], **({} if overrides else config))
        if overrides:
            for field in config:
                change(folder, **{field: {} if field.endswith("_config") else 2})
        settings = EngineConfig(
            model=str(folder), cpu_kernels=False, skip_tokenizer_init=True, hf_overrides=overrides
        )
        with pytest.raises(BadModelConfig, match=f"{name} must be at most") as error:
            load(settings)
        assert error.value.param == name


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "CohereForCausalLM"])
def test_random_weights_beyond_memory_are_refused_by_their_sizes(
    folder: Path, architecture: str
) -> None:
    change(folder, architectures=[architecture], hidden_size=1 << 19, intermediate_size=1 << 20)
    config = EngineConfig(
        model=str(folder), cpu_kernels=False, skip_tokenizer_init=True, load_format="dummy"
    )
    with pytest.raises(BadModelConfig, match=r"hidden_size 524288.*[0-9.]+ GiB of weights"):
        load(config)


@pytest.mark.parametrize("tokenizer", ["whole", "gone", "broken"])
def test_a_type_of_model_that_nobody_knows_is_named_whatever_its_tokenizer(
    folder: Path, tokenizer: str
) -> None:
    change(folder, model_type="quux", architectures=["QuuxForCausalLM"])
    (folder / "tokenizer.json").unlink(missing_ok=True)
    if tokenizer == "broken":
        (folder / "tokenizer.json").write_text("{}")
    config = EngineConfig(
        model=str(folder), cpu_kernels=False, skip_tokenizer_init=tokenizer == "whole"
    )
    with pytest.raises(ModelLoadError, match="QuuxForCausalLM isn't supported") as error:
        load(config)
    assert "tokenizer" not in str(error.value)


def test_a_broken_tokenizer_of_a_known_model_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    config = EngineConfig(model=str(folder), cpu_kernels=False)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is no tokenizer"):
        load(config)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_fault_30_files_that_never_end(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert f"{file} is no file" in str(refused(folder))


def test_fault_40_zero_heads(folder: Path) -> None:
    refused(change(folder, num_attention_heads=0))


@pytest.mark.parametrize("value", [1, math.inf, [1], [[]], {"a": 1}], ids=str)
def test_fault_40_architectures_that_are_no_list_of_names(folder: Path, value: Any) -> None:
    assert "architectures must be a list" in str(refused(change(folder, architectures=value)))


@pytest.mark.parametrize("factor", [-1, 1.5, 10**400, math.inf], ids=str)
def test_fault_40_a_share_of_dimensions_that_cannot_be(folder: Path, factor: float) -> None:
    refused(change(folder, rope_parameters=None, partial_rotary_factor=factor))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": -1},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "dynamic", "factor": math.nan},
        {"rope_type": "yarn", "factor": [4]},
        {"rope_type": "yarn", "factor": 4, "beta_fast": 0},
        {"rope_type": "longrope", "short_factor": "x", "long_factor": None},
        {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]},
    ],
    ids=str,
)
def test_fault_40_scalings_that_make_no_sense(folder: Path, scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 64, **scaling}
    error = refused(change(folder, rope_parameters=parameters))
    assert error.param == "rope_scaling"


def test_fault_40_a_context_whose_table_fills_the_memory(folder: Path) -> None:
    error = refused(change(folder, max_position_embeddings=(1 << 31) - 1))
    assert error.param == "max_model_len"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b""], ids=["bytes", "deep", "no"])
def test_fault_30_files_that_are_no_json(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    assert file in str(refused(folder))


def test_ids_that_are_none_end_nothing(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [[], "x", 2, 99999]}')
    config = EngineConfig(model=str(folder), cpu_kernels=False, skip_tokenizer_init=True)
    assert load(config).eos_token_ids == (2,)


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_integers_are_not_taken_for_weights(folder: Path, dtype: torch.dtype) -> None:
    """They are quantized in some way that nothing tells of."""
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = tensors[NAME].to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = str(refused(folder))
    assert NAME in message
    assert "no quantization_config" in message


def test_half_precision_checkpoints_keep_their_precision(folder: Path) -> None:
    tensors = {k: v.half() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, dtype="float16")
    config = EngineConfig(model=str(folder), cpu_kernels=False, skip_tokenizer_init=True)
    assert load(config).dtype == torch.float16


@pytest.mark.parametrize(
    "name",
    ["../sound/model.safetensors", "/etc/passwd", ".", "..", "a\0b", "a" * 300, "b.safetensors", 3],
    ids=lambda name: str(name)[:12],
)
def test_fault_40_an_index_that_leads_astray(folder: Path, name: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {NAME: name}}))
    assert INDEX in str(refused(folder))


def test_fault_30_weights_that_are_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")  # would be read for ever
    assert "holds neither" in str(refused(folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [64, 63]), ("shape", [1 << 62, 4]), ("shape", [-1, 64]), ("shape", []),
        ("data_offsets", [0, 1 << 62]), ("data_offsets", [100, 4]), ("data_offsets", [-4, 100]),
        ("dtype", "F16"), ("dtype", "I64"), ("dtype", "F4"), ("dtype", "X"), ("dtype", 3),
    ],
    ids=str,
)  # fmt: skip
def test_fault_40_a_header_that_lies(folder: Path, field: str, value: Any) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[NAME][field] = value
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])
    refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_fault_40_bytes_changed_anywhere_are_refused_or_read(folder: Path, name: str) -> None:
    """Of the weights' header and of the configuration: nothing but a typed error is raised."""
    path = folder / name
    full_data = path.read_bytes()
    end = len(full_data) if name == "config.json" else 8 + int.from_bytes(full_data[:8], "little")
    config = EngineConfig(model=str(folder), cpu_kernels=False, skip_tokenizer_init=True)
    rng, refused, turns = random.Random(13), 0, 30
    for turn in range(turns):
        content = bytearray(full_data)
        for _ in range(1 + turn % 3):
            content[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'0199{}[]",:'))
        path.write_bytes(content)
        try:
            load(config)
        except QuireError as error:
            refused += len(str(error)) < 2000
    assert refused > turns // 4


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def greedy(folder: Path) -> list[int]:
    llm = LLM(
        str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=16, num_threads=1
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": [3, 5, 7]}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("head", ["other", "same", "none"])
def test_fault_89_the_head_is_the_files_where_config_json_says_something_else(
    folder: Path, ties: bool, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors[EMBEDDING]
    heads = {"other": embedding.flip(0).contiguous(), "same": embedding.clone()}
    tensors.pop(HEAD, None)
    save_file(tensors | ({HEAD: heads[head]} if head in heads else {}), file, {"format": "pt"})
    change(folder, tie_word_embeddings=ties)
    tokens = greedy(folder)
    logged = "output layer" in caplog.text
    assert logged == ((ties and head == "other") or (not ties and head == "none"))
    if head == "none":  # where transformers would draw one at random
        change(folder, tie_word_embeddings=True)
    assert tokens == Oracle(folder).greedy([3, 5, 7], 12)


@pytest.mark.parametrize(
    ("head", "body"),
    [("language_model.", "language_model.model."), ("", "model.language_model.")],
)
def test_fault_89_a_text_model_under_the_names_of_a_larger_one_is_read(
    folder: Path, head: str, body: str
) -> None:
    """As training programs merge what was loaded as a model that sees."""
    expected = greedy(folder)
    file = folder / "model.safetensors"
    tensors = {
        body + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    assert greedy(folder) == expected


def test_a_pointer_in_place_of_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n"
    )
    assert "is a git-lfs pointer; get the file itself by `git lfs pull`" in str(refused(folder))
