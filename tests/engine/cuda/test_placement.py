"""Every tensor that a GPU's kernels need is on the GPU; on a device that holds nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from engine.checkpoints.safetensors import WeightReader
from engine.contract.engine_config import EngineConfig
from engine.devices.offload import iter_tensors
from engine.kv_cache.kv_cache_config import single_group_config
from engine.model_loader.model_impl import BuildRequest, LoadedImpl, build_model
from engine.models.decoder import NativeDecoder
from engine.models.forward_context import AttentionMetadata, StateStep
from engine.models.layers.moe import GroupedMoe
from engine.models.registry import decoder_spec, read_config
from engine.models.vision.family import VisionDecoder, locate_text
from engine.models.vision.registry import find_vision_family
from engine.multimodal.audio_prompts import AudioProcessor
from engine.multimodal.processor import MediaProcessor, PreparedMedia
from engine.worker.gpu.graph_dispatcher import CUDAGraphMode
from engine.worker.gpu.input_buffers import stage_inputs
from engine.worker.gpu.setup import graph_mode
from kernels import KernelSet
from kernels.triton import TritonKernels
from tests.engine.cuda.meta import META, MetaKernels
from tests.engine.models import make_model
from tests.engine.multimodal.models import FAMILIES as SEEING_FAMILIES
from tests.engine.multimodal.models import picture
from tests.engine.pooling.models import make as make_encoder
from tests.engine.speech.models import sound
from tests.engine.speech.test_audio_families import make_omni, make_ultravox, make_voxtral
from tests.engine.speech.test_qwen2_audio import make_qwen2_audio
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

Folder = Callable[[str], Path]
MIB = 1 << 20


def context(counts: tuple[int, ...] = (5, 1, 3)) -> tuple[torch.Tensor, AttentionMetadata]:
    """A step's batch on the host."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    positions = torch.cat([torch.arange(count) for count in counts])
    batch = AttentionMetadata(
        positions=positions,
        slot_mapping=torch.arange(len(positions)),
        block_tables=torch.zeros(len(counts), 2, dtype=torch.int32),
        seq_lens=torch.tensor(counts, dtype=torch.int32),
        query_start_loc=starts,
        logits_rows=starts[1:].long() - 1,
        sequence_rows=torch.arange(len(counts)),
    )
    return torch.arange(len(positions)), batch


def run_on_meta(model: Any, batch: tuple[torch.Tensor, AttentionMetadata]) -> torch.Tensor:
    staged = stage_inputs(*batch, META)
    return model.logits(model.forward(staged.token_ids, staged.context))


def load(folder: Path, dtype: torch.dtype) -> NativeDecoder:
    model = NativeDecoder(decoder_spec(read_config(folder)), MetaKernels(), dtype, 64)
    weights = WeightReader(folder)
    model.load(weights, lambda done, total: None)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-rope3", "qwen3", "mistral", "qwen2-window"])
def test_native_models(family: str, dtype: torch.dtype, model_folder: Folder) -> None:
    model = load(model_folder(family), dtype)
    assert all(tensor.device == META for tensor in iter_tensors(model))
    model.allocate_kv(4, 16, dtype)
    logits = run_on_meta(model, context())
    assert (logits.device, logits.shape, logits.dtype) == (META, (3, 384), torch.float32)


def load_with_encoder(folder: Path) -> VisionDecoder:
    family = find_vision_family(read_config(folder))
    assert family is not None
    weights = WeightReader(folder)
    spec = locate_text(decoder_spec(family.text_config), weights)
    assert spec is not None
    model = VisionDecoder(spec, MetaKernels(), torch.bfloat16, 64)
    model.family = family
    model.load(weights, lambda done, total: None)
    return model


def check_encoder(model: VisionDecoder, prepared: PreparedMedia) -> None:
    """An item's vectors are on the device, and so are the logits of a prompt with them."""
    vectors = model.encode(prepared.kind, prepared.tensors)
    assert (vectors.device, len(vectors)) == (META, prepared.num_vectors)
    model.allocate_kv(16, 16, torch.bfloat16)
    ids, batch = context((len(vectors) + 2, 1))
    batch.encoder_embeds = torch.arange(1, len(vectors) + 1), vectors
    if prepared.grid:
        batch.plane_positions = torch.zeros(len(vectors), 3, dtype=torch.int64)
    if model.family.bidirectional_span:
        batch.visible_ends = batch.positions.int() + 1
    logits = run_on_meta(model, (ids, batch))
    assert (logits.device, logits.shape[0], logits.dtype) == (META, 2, torch.float32)


@pytest.mark.parametrize("name", SEEING_FAMILIES)
def test_encoders_of_pictures(name: str, tmp_path: Path) -> None:
    SEEING_FAMILIES[name](tmp_path)
    prepared = MediaProcessor(tmp_path).prepare(picture(1, 84, 56))
    check_encoder(load_with_encoder(tmp_path), prepared)


@pytest.mark.parametrize("make", [make_omni, make_qwen2_audio, make_ultravox, make_voxtral])
def test_encoders_of_sound(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path)
    prepared = AudioProcessor.from_folder(tmp_path).prepare(sound(1, 1.3))
    check_encoder(load_with_encoder(tmp_path), prepared)


def test_latents(tmp_path: Path) -> None:
    """The layers of a head each are one tensor, and nothing is held twice."""
    make_checkpoint(RECIPES["deepseek_v3"], tmp_path)
    model = load(tmp_path, torch.bfloat16)
    assert isinstance(model.weights[1].experts, GroupedMoe)
    assert all(tensor.device == META for tensor in iter_tensors(model))
    names = [name for name, _ in model.named_tensors() if "layers.0.attention.into" in name]
    assert names == ["layers.0.attention.into.weight"]
    model.allocate_kv(4, 16, torch.bfloat16)
    assert run_on_meta(model, context()).shape == (3, 384)


class HostAllocations(TorchDispatchMode):
    """The largest tensor that was made on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor) and x.device.type == "cpu"
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in storages:
                    self.largest = max(self.largest, storage.nbytes())
        return out


def test_weights_go_straight_to_the_device(tmp_path: Path) -> None:
    """A table of 16 MB and layers of 12 MB: the host never holds more than a piece of 4 MB."""
    folder = make_model(
        "llama", tmp_path, vocab_size=8192, hidden_size=512, intermediate_size=2048,
        num_hidden_layers=2,
    )  # fmt: skip
    with HostAllocations() as host:
        model = load(folder, torch.bfloat16)
    assert model.decode_bytes > 16 * MIB
    assert 0 < host.largest <= 4 * MIB


def test_experts_go_to_the_device_one_by_one(tmp_path: Path) -> None:
    """An expert's first matrix has 2 MB, all of a layer's 24."""
    folder = make_model(
        "llama", tmp_path, model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=512, hidden_size=512, head_dim=128, num_hidden_layers=2,
    )  # fmt: skip
    with HostAllocations() as host:
        model = load(folder, torch.bfloat16)
    assert isinstance(model.weights[0].experts, GroupedMoe)
    assert all(tensor.device == META for tensor in iter_tensors(model))
    assert host.largest <= 4 * MIB


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_steps_with_experts_are_recorded_in_few_bits_too(
    quantization: str | None, tmp_path: Path
) -> None:
    folder = make_model(
        "llama", tmp_path, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, head_dim=16, num_hidden_layers=1,
    )  # fmt: skip
    spec, config = decoder_spec(read_config(folder)), EngineConfig(model=str(folder))
    ops = TritonKernels(META, "a test")
    ops.attention_backend = "TRITON_ATTN"
    model = NativeDecoder(spec, ops, torch.bfloat16, 64, quantization)
    model.load(WeightReader(folder), lambda done, total: None)
    assert graph_mode(model, config) is CUDAGraphMode.FULL_AND_PIECEWISE
    model.weights[0].experts.needs_host_sync = True  # type: ignore[union-attr]
    assert graph_mode(model, config) is CUDAGraphMode.NONE


def build(folder: Path, config: EngineConfig, ops: KernelSet) -> LoadedImpl:
    return build_model(
        BuildRequest(folder, read_config(folder), config, ops, lambda done, total: None)
    )


FAMILIES = ["bert", "roberta", "mpnet", "modernbert", "nomic_bert"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoders(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_encoder(family, tmp_path)
    config = EngineConfig(
        model=str(folder), dtype=dtype, runner="pooling", skip_tokenizer_init=True
    )
    built = build_model(
        BuildRequest(folder, read_config(folder), config, MetaKernels(), lambda done, total: None)
    )
    assert all(tensor.device == META for tensor in iter_tensors(built.model))
    ids, batch = context()
    staged = stage_inputs(ids, batch, META)
    remote_context = staged.context
    remote_context.query_start_loc = batch.query_start_loc
    types = torch.zeros(len(ids), dtype=torch.int64, device=META)
    hidden = built.model.forward(staged.token_ids, remote_context, types)  # type: ignore[call-arg]
    assert (hidden.device, hidden.dtype) == (META, torch.float32)
    assert hidden.shape == (len(ids), built.spec.hidden_size)


BRIDGED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BRIDGED)
def test_bridged_models(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, num_hidden_layers=2, model_type=kind, **BRIDGED[kind])
    config = EngineConfig(
        model=str(folder), dtype=dtype, model_impl="transformers", cpu_kernels=False,
        skip_tokenizer_init=True, max_model_len=64,
    )  # fmt: skip
    built = build_model(
        BuildRequest(
            folder,
            read_config(folder),
            config,
            kernels.get("cpu", use_compiled=False),
            lambda done, total: None,
        )
    )
    model: Any = built.model
    model.to_device(MetaKernels())
    assert all(tensor.device == META for tensor in iter_tensors(model))
    model.allocate_kv(4, 16, built.dtype)
    logits = run_on_meta(model, context())
    assert (logits.device, logits.shape, logits.dtype) == (META, (3, 384), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["jamba", "kimi_linear", "lfm2", "mamba2", "minimax", "nemotron_h", "qwen3_next",
     "recurrent_gemma", "zamba2"],
)  # fmt: skip
def test_models_that_carry_a_state(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A prompt goes on from a copy, one is saved on its way, and one decodes."""
    make_checkpoint(RECIPES[name], tmp_path)
    model = load(tmp_path, dtype)
    assert all(tensor.device == META for tensor in iter_tensors(model))
    layout = single_group_config(len(model.spec.attention_layers)).with_states(6)
    model.allocate_kv(4, 16, dtype, layout)
    *states, num_tokens = model.state_tensors()
    assert all(tensor.device == META for tensor in states)
    ids, batch = context()
    batch.positions[5] = 7
    num_tokens[:] = torch.tensor([0, 0, 7, 9, 0, 0])
    batch.states = StateStep(torch.tensor([0, 4, 1]), [(2, 4)], torch.tensor([(3, 5)]))
    logits = run_on_meta(model, (ids, batch))
    assert (logits.device, logits.shape, logits.dtype) == (META, (3, 384), torch.float32)
    assert num_tokens.tolist() == [5, 3, 7, 9, 8, 3]
    if model.spec.attention_layers:
        model.ops.attention_backend = "TRITON_ATTN"
    assert graph_mode(model, EngineConfig(model=str(tmp_path))) is CUDAGraphMode.FULL_DECODE_ONLY


STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4, "expand": 2, "conv_kernel": 4, "time_step_rank": 4},
    "jamba": {"mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 1, "attn_layer_period": 2,
              "attn_layer_offset": 1, "use_mamba_kernels": False},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_chunk_size": 16,
                         "num_local_experts": 0, "layer_types": ["mamba", "attention"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", STATEFUL)
def test_bridged_models_that_carry_a_state(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts first, then a step in which all of them decode together."""
    folder = make_model("llama", tmp_path, num_hidden_layers=2, model_type=kind, **STATEFUL[kind])
    config = EngineConfig(
        model=str(folder), max_model_len=64, skip_tokenizer_init=True, model_impl="transformers"
    )
    built = build_model(
        BuildRequest(folder, read_config(folder), config, MetaKernels(), lambda done, total: None)
    )
    model: Any = built.model
    assert model.stateful
    assert all(tensor.device == META for tensor in iter_tensors(model))
    model.allocate_kv(8, 16, built.dtype)
    assert run_on_meta(model, context((5, 2, 3))).device == META
    ids, batch = context((1, 1, 1))
    batch.positions = torch.tensor([5, 2, 3])
    batch.seq_lens = batch.positions.int() + 1
    logits = run_on_meta(model, (ids, batch))
    assert (logits.device, logits.shape, logits.dtype) == (META, (3, 384), torch.float32)
