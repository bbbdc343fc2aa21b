"""What a model needs, told before it's loaded: held against what the engine takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catalog.checkpoint import Checkpoint, KvShape, read_checkpoint, shape_of
from catalog.sizing import (
    PROCESS_BYTES,
    estimate_memory,
    kv_bytes_per_token,
    sequence_bytes,
    weight_bytes,
)
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo" / "model"
#: What the engine says of a model, from a process that loads it with each of the settings.
LOADED = """
import json, sys
from engine import LLM
for given in json.loads(sys.argv[2]):
    llm = LLM(sys.argv[1], num_gpu_blocks_override=64, **given)
    core = llm.llm_engine.core
    print("told", json.dumps({
        "kv": core.capacity.kv_bytes_per_token,
        "weights": sum(each.nbytes for each in core.facts.load_report),
        "architecture": core.facts.architecture,
    }))
    llm.llm_engine.shutdown()
"""
CONFIGS: list[dict[str, Any]] = [
    {},
    {"quantization": "int4", "kv_cache_dtype": "int8"},
    {"quantization": "fp8"},
    {"quantization": "bitsandbytes"},
    {"dtype": "float32"},
]


@pytest.mark.system
def test_the_estimate_is_what_the_engine_takes() -> None:
    command = [sys.executable, "-c", LOADED, str(DEMO), json.dumps(CONFIGS)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True
    )
    payloads = [
        json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")
    ]
    checkpoint = read_checkpoint(DEMO)
    assert len(payloads) == len(CONFIGS)
    for fields, payload in zip(CONFIGS, payloads, strict=True):
        config = EngineConfig.from_mapping(fields)
        assert checkpoint.architecture == payload["architecture"] == "LlamaForCausalLM"
        assert kv_bytes_per_token(checkpoint, config) == payload["kv"]
        assert weight_bytes(checkpoint, config) == pytest.approx(payload["weights"], rel=0.06)


def test_the_transformers_bridge_widens_the_weights_of_a_float32_model() -> None:
    checkpoint = Checkpoint("X", "safetensors", 2048, 1, dtype="BF16", matrix_values=1024)

    def nbytes(**settings: Any) -> int:
        return weight_bytes(checkpoint, EngineConfig(dtype="float32", **settings))

    assert (nbytes(), nbytes(model_impl="transformers")) == (2048, 4096)


DENSE = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("more", "windows", "kv_heads", "head_dim"),
    [
        ({"num_key_value_heads": 2}, (0, 0, 0), 2, 16),
        ({"sliding_window": 24, "head_dim": 32}, (24, 24, 24), 4, 32),
        (
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            (0, 16, 16),
            4,
            16,
        ),
        ({"sliding_window": 16, "use_sliding_window": False}, (0, 0, 0), 4, 16),
        ({"multi_query": True}, (0, 0, 0), 1, 16),
        ({"text_config": {"head_dim": 8}}, (0, 0, 0), 4, 8),
        ({"layer_types": ["mamba", "attention", "mamba"]}, (0,), 4, 16),
        ({"full_attention_interval": 2}, (0,), 4, 16),
        ({"layers_block_type": ["mlp", "full_attention", "linear_attention"]}, (0,), 4, 16),
        ({"hybrid_override_pattern": "M*-"}, (0,), 4, 16),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, (0,), 4, 16),
    ],
)
def test_windows_and_heads_are_those_of_the_family(
    more: dict[str, Any], windows: tuple[int, ...], kv_heads: int, head_dim: int
) -> None:
    shape = shape_of({**DENSE, **more})
    assert shape is not None
    assert (shape.windows, shape.kv_heads, shape.head_dim) == (windows, kv_heads, head_dim)
    assert shape.layers == len(windows)


def test_windows_bound_what_a_long_sequence_takes() -> None:
    shape = KvShape(layers=2, kv_heads=1, head_dim=8, windows=(0, 64), context=4096)
    checkpoint = Checkpoint("X", "safetensors", 1000, 1, dtype="F32", shape=shape)
    config = EngineConfig()
    layer = 2 * 8 * 4
    assert kv_bytes_per_token(checkpoint, config) == 2 * layer
    assert sequence_bytes(checkpoint, config, 1024) == (1024 + 64 + 16) * layer
    assert sequence_bytes(checkpoint, config, 10) == 2 * 16 * layer


def test_what_does_not_fit_is_said_so() -> None:
    small = Checkpoint("X", "safetensors", 10 << 20, 1)
    huge = Checkpoint("X", "safetensors", 1 << 50, 1)
    assert estimate_memory(small, {}).fits
    assert not estimate_memory(huge, {}).fits
    assert estimate_memory(huge, {}).kv_per_token is None


def test_ranks_share_weights_and_each_is_a_process() -> None:
    checkpoint = Checkpoint("X", "safetensors", 8 << 30, 1)
    one = estimate_memory(checkpoint, {})
    two = estimate_memory(checkpoint, {"tensor_parallel_size": 2})
    assert (two.num_ranks, two.total) == (2, one.total + PROCESS_BYTES)
    assert two.per_rank * 2 == two.total
    settings = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}
    half = estimate_memory(checkpoint, settings)
    assert (half.num_ranks, half.weights) == (2, one.weights)
    assert half.total < two.total


def test_ranks_that_have_some_tokens_each_gather_a_layer_of_a_prompt() -> None:
    ranks = {"tensor_parallel_size": 2, "max_model_len": 512}
    default = estimate_memory(read_checkpoint(DEMO), ranks, sequences=0)
    dealt = estimate_memory(
        read_checkpoint(DEMO), {**ranks, "decode_context_parallel_size": 2}, sequences=0
    )
    shape = read_checkpoint(DEMO).shape
    assert shape is not None
    assert default.kv_per_token is not None
    assert dealt.total - default.total == 2 * 512 * default.kv_per_token // shape.layers


def test_a_successor_has_its_predecessors_kv_cache_once() -> None:
    shape = KvShape(layers=2, kv_heads=1, head_dim=8, windows=(0, 0), context=4096)
    checkpoint = Checkpoint("X", "safetensors", 1 << 20, 1, dtype="F32", shape=shape)

    def total(tokens: int, **settings: Any) -> int:
        return estimate_memory(checkpoint, settings, sequences=0, predecessor_tokens=tokens).total

    per_token = 2 * 2 * 8 * 4
    assert total(80_000) - total(40_000) == 40_000 * per_token
    limit = 4 << 30  # of a KV cache whose size isn't configured
    assert total(10**9) - total(40_000) == limit - 40_000 * per_token
    configured = {"cpu_kvcache_space": 1}
    assert total(0, **configured) == total(10**6, **configured)
    assert total(0, **configured) - total(40_000) == (1 << 30) - 40_000 * per_token


def test_replicas_that_share_experts_load_a_part_of_them() -> None:
    checkpoint = Checkpoint("X", "safetensors", 8 << 30, 1, expert_nbytes=6 << 30)
    group: dict[str, Any] = {
        "data_parallel_size": 3,
        "distributed_executor_backend": "external_launcher",
    }
    group["enable_expert_parallel"] = True
    assert estimate_memory(checkpoint, group).weights == pytest.approx(4 << 30)
    assert estimate_memory(checkpoint, {"enable_expert_parallel": True}).weights == 8 << 30


def test_a_config_that_says_nothing_has_no_shape() -> None:
    assert shape_of({}) is None
    assert shape_of({**DENSE, "layer_types": ["mamba"] * 3}) is None
    assert shape_of({"num_hidden_layers": "many", "num_attention_heads": 0}) is None


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\xff" * 8,
        (9).to_bytes(8, "little") + b"[1, 2, 3]",
        (60).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,999999]}}',
    ],
    ids=["empty", "endless", "list", "outside"],
)
def test_unsound_weights_are_refused(tmp_path: Path, weights: bytes) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(InvalidRequest, match="isn't a valid safetensors"):
        read_checkpoint(tmp_path)


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match=r"No .safetensors files found"):
        read_checkpoint(tmp_path)
