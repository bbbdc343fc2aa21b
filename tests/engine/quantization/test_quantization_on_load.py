"""`quantization="int8"`, `"int4"`, `"fp8"` and bitsandbytes' nf4: rounded while they load, close to
the whole, and small.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.lora import LoRARequest
from engine.models.decoder import NativeDecoder
from engine.quantization.online import CODE_FORMATS, round_to_codes
from engine.quantization.packing import DenseSource, LinearPacker, LoadBuffer
from kernels.linear_factory import dequantize_codes
from kernels.reference import ReferenceKernels
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import Pair, make_pair
from tests.engine.checkpoints.packages import bitsandbytes4
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.models import make_model
from tests.engine.quantization.perplexity import COUNTS, demo_perplexity

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_model_len": 128}
Folder = Callable[[str], Path]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [("int8", 0.005), ("int4", 0.04), ("fp8", 0.01), ("bitsandbytes", 0.04)],
)
def test_perplexity_stays_near_that_of_bfloat16(
    quantization: str, tolerance: float, count: int | None
) -> None:
    expected = demo_perplexity(count=count)
    assert demo_perplexity(quantization, count=count) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_without_a_compiler_the_results_are_as_good(quantization: str) -> None:
    # PyTorch's own products take minutes for all answers.
    assert demo_perplexity(quantization, compiled=False, count=16) == pytest.approx(
        demo_perplexity(quantization, count=16), rel=0.005
    )


@pytest.mark.parametrize("family", ["llama", "llama-rope3", "qwen3"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "bitsandbytes"])
def test_any_native_checkpoint_runs_and_batches_like_alone(
    family: str, quantization: str, model_folder: Folder
) -> None:
    llm = LLM(
        str(model_folder(family)),
        quantization=quantization,
        num_gpu_blocks_override=100,
        max_model_len=128,
    )
    prompts = [[5, 6, 7, 8], [9] * 30, [11]]
    together = [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY, use_tqdm=False)]
    llm.core.reset_prefix_cache()
    for prompt, tokens in zip(prompts, together, strict=True):
        isolated_output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert isolated_output.outputs[0].token_ids == tokens


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_of_64_bits_are_rounded_as_those_of_32(
    quantization: str | None, model_folder: Folder, tmp_path: Path
) -> None:
    """Also where one layer is made of tensors of several types."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "m")
    tokens = []
    for wide in ("nothing", "q_proj", "weight"):
        tensors = load_file(model_folder("llama") / "model.safetensors")
        tensors = {k: v.double() if wide in k else v for k, v in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        llm = LLM(str(folder), quantization=quantization, num_gpu_blocks_override=8)
        tokens.append(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_layers_are_small_and_the_tables_stay_in_eight_bits(model_folder: Folder) -> None:
    sizes = {}
    for quantization in (None, "int8", "int4"):
        llm = LLM(
            str(model_folder("llama")), quantization=quantization, num_gpu_blocks_override=8,
            max_model_len=64,
        )  # fmt: skip
        model = llm.core.executor.worker.loaded.model
        assert isinstance(model, NativeDecoder)
        sizes[quantization] = sum(layer.nbytes for layer in model.weights), model.lm_head.nbytes
    # Groups of 128 are wider than these rows of 64 to 96 values, which are padded.
    assert sizes["int4"][0] < sizes[None][0] / 5
    assert sizes["int8"][1] == sizes["int4"][1] < sizes[None][1]


def test_a_method_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"int8, int4, fp8.*got 'int3'") as error:
        EngineConfig(model="m", quantization="int3")
    assert error.value.param == "quantization"


# -- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 48, 128, 200, 256])
def test_e4m3_is_as_near_as_its_three_bits_allow(width: int) -> None:
    torch.manual_seed(1)
    weights = torch.randn(64, width) * torch.logspace(-6, 2, 64)[:, None]
    form = CODE_FORMATS["fp8"]
    error = (dequantize_codes(round_to_codes(weights, form), form) - weights).abs()
    largest = weights.abs().amax(1, keepdim=True)
    assert bool((error <= torch.maximum(weights.abs() / 16, largest * 2**-17)).all())
    zeros = dequantize_codes(round_to_codes(torch.zeros(2, width), form), form)
    assert not zeros.any()


def test_nf4_is_what_bitsandbytes_makes_of_the_same_weights() -> None:
    torch.manual_seed(2)
    weights = torch.randn(32, 128)
    form = CODE_FORMATS["nf4"]
    _, expected = bitsandbytes4("nf4", False)(weights)
    torch.testing.assert_close(
        dequantize_codes(round_to_codes(weights, form), form), expected, rtol=1e-6, atol=1e-6
    )


def test_rows_without_whole_groups_have_eight_bits() -> None:
    weights = torch.randn(64, 40)
    layer = LinearPacker([DenseSource(weights)]).pack(
        ReferenceKernels(), None, torch.float32, "nf4"
    )
    assert (layer.rows(torch.arange(64)) - weights).abs().max() < 0.05


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A checkpoint of bitsandbytes, whose blocks of 64 are whole in each row."""
    folder = tmp_path_factory.mktemp("nf4")
    source = make_model("llama", folder / "source", intermediate_size=128)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return make_pair(source, folder, config, bitsandbytes4("nf4", False))


@pytest.mark.parametrize(
    "options",
    [
        {"load_format": "bitsandbytes"},
        {"quantization": "bitsandbytes"},
        {"quantization": "bitsandbytes", "load_format": "bitsandbytes"},
    ],
    ids=["load-format", "quantization", "both"],
)
def test_bitsandbytes_rounds_as_a_checkpoint_of_it_was_rounded(
    options: dict[str, str], nf4: Pair
) -> None:
    source = nf4.packed.parent / "source"
    llm = LLM(str(source), **SMALL, **options)
    tokens = llm.generate([[5, 6, 7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    checkpoint = LLM(str(nf4.packed), **SMALL)
    expected = checkpoint.generate([[5, 6, 7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0]
    assert tokens == expected.token_ids


def test_an_adapter_on_a_rounded_model_is_one_on_a_checkpoint_of_bitsandbytes(
    nf4: Pair, tmp_path: Path
) -> None:
    """The QLoRA flow of vLLM's manual."""
    adapter = make_adapter(nf4.dense, tmp_path / "adapter")
    request = LoRARequest("qlora", 1, str(adapter))
    answers = []
    for folder, settings in (
        (
            nf4.packed.parent / "source",
            {"load_format": "bitsandbytes", "qlora_adapter_name_or_path": str(adapter)},
        ),
        (nf4.packed, {}),
    ):
        llm = LLM(str(folder), enable_lora=True, max_lora_rank=64, **SMALL, **settings)
        for lora_request in (None, request):
            result = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False, lora_request=lora_request)
            answers.append(result[0].outputs[0].token_ids)
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


def test_a_checkpoint_of_another_format_is_not_rounded_by_bitsandbytes(
    nf4: Pair, model_folder: Folder, tmp_path: Path
) -> None:
    packed = make_pair(
        model_folder("llama"), tmp_path, {"quant_method": "fp8"}, writers.fp8("row")
    ).packed
    with pytest.raises(ConfigError, match="was quantized by fp8"):
        LLM(str(packed), load_format="bitsandbytes")


def test_deepspeedfp_is_fp8() -> None:
    assert EngineConfig(model="m", quantization="deepspeedfp").quantization == "fp8"


# -- stacks ---------------------------------------------------------------------------------------


def test_a_stack_is_packed_in_pieces_and_releases_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.quantization.packing._SLICE_BYTES", 64 * 16 * 4)
    torch.manual_seed(0)
    parts = [torch.randn(rows, 16) for rows in (70, 1, 129)]
    released = []
    stack = LinearPacker([DenseSource(p) for p in parts], release=lambda: released.append(1))
    layer = stack.pack(ReferenceKernels(), None, torch.float32, None)
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), x @ torch.cat(parts).T)
    assert len(released) == 4  # 200 rows, 64 at a time


def test_a_stack_in_another_order() -> None:
    weight, order = torch.randn(100, 16), torch.randperm(100)
    stack = LinearPacker([DenseSource(weight)], order)
    layer = stack.pack(ReferenceKernels(), None, torch.float32, None)
    assert torch.equal(layer.rows(torch.arange(100)), weight[order])


# -- memory ---------------------------------------------------------------------------------------


def test_pieces_are_joined_and_converted_in_one_buffer() -> None:
    scratch = LoadBuffer()
    parts = [torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(3, 8)]
    joined = scratch.concatenate(parts, None)
    assert joined.dtype == torch.float32
    assert torch.equal(joined, torch.cat([part.float() for part in parts]))
    full_tensor = torch.randn(5, 8)
    assert scratch.concatenate([full_tensor], torch.float32) is full_tensor
    again = scratch.concatenate([full_tensor], torch.float16)
    assert torch.equal(again, full_tensor.half())
    assert again.data_ptr() == joined.data_ptr()
