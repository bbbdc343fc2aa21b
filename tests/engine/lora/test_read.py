"""What an adapter's files may hold: all else is refused by name, before memory is taken."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.lora import adapter_config as named_values
from engine.lora.adapter_config import parse_adapter_config
from engine.lora.check import check_adapter, main
from engine.lora.reader import read_adapter
from engine.lora.target_modules import TargetModules
from engine.models.registry import decoder_spec, read_config

from .adapters import DEMO_MODEL, PIRATE, first_a, pirate, write_adapter, zeros

Files = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def modules() -> TargetModules:
    return TargetModules(decoder_spec(read_config(DEMO_MODEL)))


def test_the_demo_adapter_is_read_whole(modules: TargetModules) -> None:
    adapter = read_adapter(PIRATE, modules)
    assert len(adapter.modules) == 6 * 7
    delta = adapter.modules["model.layers.5.mlp.down_proj"]
    assert delta.a is not None
    assert delta.b is not None
    assert delta.a.shape == (8, 704)
    assert delta.b.shape == (256, 8)
    assert delta.scale == 2.0
    assert adapter.rank == 8


def test_pytorchs_file_is_read_where_no_safetensors_are(
    modules: TargetModules, tmp_path: Path
) -> None:
    config, tensors = pirate()
    write_adapter(tmp_path, config, tensors)
    expected = read_adapter(tmp_path, modules)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    assert read_adapter(tmp_path, modules).digest == expected.digest
    (tmp_path / WEIGHTS_FILE).unlink()
    adapter = read_adapter(tmp_path, modules)
    assert adapter.digest != expected.digest
    assert adapter.modules.keys() == expected.modules.keys()
    for name, layer in adapter.modules.items():
        assert torch.equal(layer.b, expected.modules[name].b)
    torch.save({"a": {"b": 1}}, tmp_path / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match="something else than tensors by name"):
        read_adapter(tmp_path, modules)


@pytest.mark.parametrize("wrapper", ["", "language_model.", "model.language_model."])
def test_an_adapter_of_a_larger_model_is_read_as_that_of_its_text(
    wrapper: str, tmp_path: Path, modules: TargetModules
) -> None:
    """As it was trained on a model that sees, or without the wrapper of the causal model."""
    config, tensors = pirate()
    renamed = {
        name.replace("base_model.model.model.", f"base_model.model.{wrapper}"): tensor
        for name, tensor in tensors.items()
    }
    write_adapter(tmp_path, config, renamed)
    expected = read_adapter(PIRATE, modules)
    assert read_adapter(tmp_path, modules).modules.keys() == expected.modules.keys()


def _misstated_rank(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = first_a(tensors)
    tensors[name] = tensors[name][:4]
    return name


def _nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = first_a(tensors)
    tensors[name][0, 0] = float("nan")
    return name


def _no_partner(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = first_a(tensors)
    del tensors[name.replace("lora_A", "lora_B")]
    return name


def _unknown_module(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight"
    tensors[name] = zeros(8, 256)
    return name


def _unknown_tensor(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = "base_model.model.model.layers.0.mlp.up_proj.hada_w1_a"
    tensors[name] = zeros(8, 256)
    return name


def _integers(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = first_a(tensors)
    tensors[name] = tensors[name].to(torch.int8)
    return name


def _full_module(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    name = "base_model.model.model.layers.0.mlp.up_proj.modules_to_save.weight"
    tensors[name] = zeros(704, 256)
    return name


def _nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    tensors.clear()
    return "path"


def _setting(name: str, value: Any) -> Callable[..., str]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
        config[name] = value
        return name

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        _misstated_rank, _nan, _no_partner, _unknown_module, _unknown_tensor, _integers,
        _full_module, _nothing, _setting("peft_type", "LOHA"), _setting("r", 0), _setting("r", "8"),
        _setting("r", True), _setting("lora_alpha", float("inf")), _setting("bias", "some"),
        _setting("use_rslora", "yes"), _setting("init_lora_weights", "pissa"),
        _setting("use_qalora", True), _setting("alora_invocation_tokens", [1]),
        _setting("layer_replication", [[0, 2]]), _setting("a_setting_to_come", {"on": True}),
        _setting("rank_pattern", {"q_proj": 0}), _setting("alpha_pattern", {"q_proj": "8"}),
        _setting("rank_pattern", {"(": 8}), _setting("rank_pattern", {"q{e<=1}": 8}),
        _setting("alpha_pattern", {f"layers.{n}.*": 8 for n in range(65)}),
        _setting("modules_to_save", "lm_head"), _setting("trainable_token_indices", [5, 5]),
        _setting("trainable_token_indices", {"embed_tokens": [-1]}),
        _setting("trainable_token_indices", "5"), _setting("target_modules", 3),
        _setting("target_modules", {"q_proj": 8}), _setting("target_modules", ["q_proj", 3]),
    ],
)  # fmt: skip
def test_fault_20_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, modules: TargetModules, spoil: Callable[..., str]
) -> None:
    config, tensors = pirate()
    named = spoil(config, tensors)
    folder = write_adapter(tmp_path / "adapter", config, tensors)
    with pytest.raises(InvalidRequest) as refused:
        read_adapter(folder, modules)
    assert refused.value.param == named
    assert str(folder) not in refused.value.message  # it's a tenant who reads it


EMBEDDING, HEAD = "base_model.model.model.embed_tokens.", "base_model.model.lm_head."


@pytest.mark.parametrize(
    ("tensor", "shape", "text"),
    [
        (f"{EMBEDDING}modules_to_save.weight", (513, 256), "embedding has 513 .* layer 3072"),
        (f"{EMBEDDING}lora_embedding_A", (8, 600), "600 tokens, but the adapter's table is for"),
        (f"{HEAD}weight", (515, 256), "embedding has 3072 tokens, the output layer 515"),
        (f"{HEAD}weight", (3073, 256), "embedding has 3072 tokens, the output layer 3073"),
        (f"{HEAD}lora_B.weight", (511, 8), "511 tokens, but the adapter's table is for 3072"),
        (f"{HEAD}bias", (513,), "513 tokens, but the adapter's table is for 3072"),
    ],
)
def test_tables_of_other_vocabularies_are_refused_with_both(
    tmp_path: Path, modules: TargetModules, tensor: str, shape: tuple[int, ...], text: str
) -> None:
    assert modules.vocab_size == 3072
    config, tensors = pirate()
    folder = write_adapter(tmp_path / "adapter", config, {**tensors, tensor: zeros(*shape)})
    with pytest.raises(InvalidRequest, match=f"'{tensor}' is for a vocabulary .*{text}"):
        read_adapter(folder, modules)


def test_tokens_behind_the_vocabulary_follow_each_other(
    tmp_path: Path, modules: TargetModules
) -> None:
    config, tensors = pirate()
    config["trainable_token_indices"] = [7, 5000]
    tensors[f"{EMBEDDING}token_adapter.trainable_tokens_delta"] = zeros(2, 256)
    folder = write_adapter(tmp_path / "adapter", config, tensors)
    with pytest.raises(InvalidRequest, match=r"has token 5000, but not all .* model's 3072 tokens"):
        read_adapter(folder, modules)
    config["trainable_token_indices"] = [7]
    folder = write_adapter(tmp_path / "adapter", config, tensors)
    with pytest.raises(InvalidRequest, match=r"has shape \[2, 256\], but it must be \[1, 256\]"):
        read_adapter(folder, modules)


@pytest.mark.parametrize("name", ["new_embeddings.safetensors", "new_embeddings.bin"])
def test_a_file_of_new_tokens_that_is_none_is_refused(
    tmp_path: Path, modules: TargetModules, name: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", *pirate())
    (folder / name).write_bytes(b"")
    with pytest.raises(InvalidRequest, match=name) as refused:
        read_adapter(folder, modules)
    assert refused.value.param == name


def test_a_rank_above_the_bound_is_refused(modules: TargetModules) -> None:
    with pytest.raises(InvalidRequest, match=r"rank 8 is over max_lora_rank \(4\)"):
        read_adapter(PIRATE, modules, 4)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps({"a": 1}), b"", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"{}" + b"x" * 99],
    ids=["pickle", "empty", "header-of-2^64", "bytes-behind"],
)
def test_fault_20_a_file_that_is_no_safetensors_is_refused(
    tmp_path: Path, modules: TargetModules, content: bytes
) -> None:
    write_adapter(tmp_path, *pirate())
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"adapter_model\.safetensors"):
        read_adapter(tmp_path, modules)


def test_a_truncated_file_is_refused(tmp_path: Path, modules: TargetModules) -> None:
    write_adapter(tmp_path, *pirate())
    path = tmp_path / WEIGHTS_FILE
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InvalidRequest, match="isn't a valid safetensors file"):
        read_adapter(tmp_path, modules)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE])
def test_fault_20_bytes_changed_anywhere_are_refused_or_read(
    name: str, tmp_path: Path, modules: TargetModules
) -> None:
    """Of the weights' header and of the configuration: nothing but `InvalidRequest` is raised."""
    config, tensors = pirate()
    few = {key: tensor for key, tensor in tensors.items() if ".layers.0." in key}
    path = write_adapter(tmp_path, config, few) / name
    full_data = path.read_bytes()
    size = len(full_data) if name == CONFIG_FILE else 8 + int.from_bytes(full_data[:8], "little")
    rng, refused, turns = random.Random(9), 0, 120
    for turn in range(turns):
        content = bytearray(full_data)
        for _ in range(1 + turn % 3):
            content[rng.randrange(size)] = rng.choice((rng.randrange(256), *b'0199{}[]",:'))
        path.write_bytes(content)
        try:
            read_adapter(tmp_path, modules)
        except InvalidRequest as error:
            refused += len(error.message) < 2000
    assert refused > turns // 4


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"peft_type": 1}'])
def test_a_broken_configuration_is_refused(
    tmp_path: Path, modules: TargetModules, text: str
) -> None:
    write_adapter(tmp_path, *pirate())
    (tmp_path / CONFIG_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest):
        read_adapter(tmp_path, modules)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"peft_type": "LORA", "r": 8, "r": 8}', "r"),
        ('{"peft_type": "LORA", "rank_pattern": {"q_proj": 4, "q_proj": 8}}', "q_proj"),
    ],
)
def test_a_setting_that_is_there_twice_is_refused_by_name(
    tmp_path: Path, modules: TargetModules, text: str, key: str
) -> None:
    write_adapter(tmp_path, *pirate())
    (tmp_path / CONFIG_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match="is there twice") as caught:
        read_adapter(tmp_path, modules)
    assert caught.value.param == key


@pytest.mark.parametrize("value", ["all-linear", ["q_proj"], None])
def test_target_modules_may_be_a_pattern_names_or_nothing(value: Any) -> None:
    assert parse_adapter_config({"peft_type": "LORA", "target_modules": value}).rank == 8


def test_the_digest_is_of_weights_and_configuration(tmp_path: Path, modules: TargetModules) -> None:
    config, tensors = pirate()
    same = read_adapter(write_adapter(tmp_path / "same", config, tensors), modules).digest
    again = read_adapter(write_adapter(tmp_path / "again", config, tensors), modules).digest
    config["lora_alpha"] = 17
    other = read_adapter(write_adapter(tmp_path / "other", config, tensors), modules).digest
    assert same == again != other
    assert len(same) == 64


def test_patterns_and_rank_stabilisation_say_the_scale() -> None:
    config = parse_adapter_config(
        {
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "use_rslora": True,
            "rank_pattern": {r"layers\.1\..*q_proj": 4},
            "alpha_pattern": {"q_proj": 32},
        }
    )
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 4
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 32 / 2
    assert config.scale_of("model.layers.0.mlp.up_proj") == 16 / 8**0.5


@pytest.mark.parametrize("key", ["(a+)+b", ".*.*.*.*.*x", "(a|a)*b"])
def test_fault_20_a_pattern_with_no_end_of_ways_to_match_is_matched_in_bounded_time(
    key: str,
) -> None:
    config = parse_adapter_config({"peft_type": "LORA", "r": 8, "rank_pattern": {key: 4}})
    assert config.rank_of("model.layers.1." + 60 * "a") == 8


def test_fault_20_the_time_of_all_patterns_and_names_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_values, "_MAX_MATCH_S", 0.02)
    keys = {f".*(?:.*a)*@{number}": 4 for number in range(64)}
    config = parse_adapter_config({"peft_type": "LORA", "rank_pattern": keys})
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(1000)]
    with pytest.raises(InvalidRequest, match="rank_pattern"):
        sum(map(config.rank_of, modules))


def test_the_first_key_counts_be_it_a_name_or_a_pattern() -> None:
    def rank(*keys: str) -> int:
        pattern = {key: 2 + index for index, key in enumerate(keys)}
        config = parse_adapter_config({"peft_type": "LORA", "r": 64, "rank_pattern": pattern})
        return config.rank_of("model.layers.1.mlp.up_proj")

    assert rank("up_proj", "mlp.up_proj", ".*up.*") == 2
    assert rank("down_proj", ".*up.*", "up_proj") == 3
    assert rank("layers.1.mlp.up_proj", ".*") == 2
    assert rank("p_proj", "layers.1", "up_pro") == 64
    assert rank(*(f"layers.{number}.mlp.up_proj" for number in range(9_999))) == 3


def test_models_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["NobodysForCausalLM"]}), encoding="utf-8"
    )
    verdict = check_adapter(str(tmp_path), PIRATE)
    assert verdict.error is not None
    assert "NobodysForCausalLM" in verdict.error["message"]


@pytest.mark.system
def test_the_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own where it refuses; test_probe.py has one that doesn't."""
    flags = ["--model", str(DEMO_MODEL), "--adapter"]
    assert main([*flags, str(PIRATE)]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert (payload["ok"], payload["error"], payload["rank"]) == (True, None, 8)
    assert payload["num_bytes"] == 2 * payload["num_parameters"] > 0
    command = [sys.executable, "-m", "engine.lora.check", *flags, str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, check=False)
    payload = json.loads(done.stdout)
    assert (done.returncode, payload["ok"], payload["error"]["param"]) == (1, False, "path")
