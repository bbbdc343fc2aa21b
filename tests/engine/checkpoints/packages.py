"""Weights in the layouts that the formats' own packages write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.engine.checkpoints.writers import Writer, Written

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs


def scheme(**weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors, all of whose linear layers are alike."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def compressed(kind: str, **weights: Any) -> Writer:
    """By compressed-tensors' own compressor."""

    def write(weight: Tensor) -> Written:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(**weights)
        quantization_scheme = QuantizationScheme(targets=["Linear"], weights=args)
        scales, zeros = _scales(weight, args)
        state = {"weight": weight.clone(), "weight_scale": scales}
        if zeros is not None:
            state["weight_zero_point"] = zeros
        compressor = BaseCompressor.get_value_from_registry(kind)
        packed = compressor.compress(dict(state), quantization_scheme)
        full_weight = compressor.decompress(dict(packed), quantization_scheme)["weight"]
        return {name: tensor.contiguous() for name, tensor in packed.items()}, full_weight.float()

    return write


def _scales(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor | None]:
    parts = _parts(weight, args)
    if args.type == "float":
        scales = parts.abs().amax(-1) / 448
        if args.scale_dtype == torch.uint8:
            scales = scales.log2().ceil().exp2()
        return scales.view(-1) if args.strategy == "tensor" else scales, None
    max_code = (1 << args.num_bits) - 1
    # As they come with a model in bfloat16: float16 holds them.
    if args.symmetric:
        return (2 * parts.abs().amax(-1) / max_code).bfloat16().float(), None
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / max_code).bfloat16().float()
    zeros = (-low / scales - (max_code + 1) / 2).round().clamp(-(max_code + 1) // 2, max_code // 2)
    return scales, zeros.to(torch.int8)


def _parts(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """[scales' rows, scales' columns, values that share one]."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.view(1, 1, -1)
    if args.strategy == "block":
        assert args.block_structure is not None
        high, wide = args.block_structure
        return weight.view(rows // high, high, columns // wide, wide).transpose(1, 2).flatten(2)
    return weight.view(rows, -1, args.group_size if args.strategy == "group" else columns)


def bitsandbytes4(kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> Writer:
    """By bitsandbytes' own functions; it dequantizes wrongly where widths aren't whole blocks."""

    def write(weight: Tensor) -> Written:
        from bitsandbytes import functional as bnb

        packed, state = bnb.quantize_4bit(
            weight, quant_type=kind, blocksize=64, compress_statistics=nested, quant_storage=storage
        )
        inputs = {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
        code = state.code.float()
        absmax = state.absmax
        if nested:
            absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
        flat = packed.flatten().view(torch.uint8)
        numbers = torch.stack((flat >> 4, flat & 15), -1).flatten().long()
        factors = absmax.float().repeat_interleave(64)[: weight.numel()]
        full_view = (code[numbers][: weight.numel()] * factors).view(weight.shape)
        return {"weight": packed, **inputs}, full_view

    return write


def torchao8(group: int | None) -> tuple[Writer, dict[str, str]]:
    """By torchao's own functions, and the words of the header that it writes."""
    header: dict[str, str] = {}

    def write(weight: Tensor) -> Written:
        # Seconds of imports, for those who write alone and not for all who collect tests.
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup

        config = (
            Int8WeightOnlyConfig()
            if group is None
            else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group))
        )
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(weight.clone())
        quantize_(layer, config)
        data = layer.weight.data
        tensors, words = flatten_tensor_state_dict({"layer.weight": data})
        header["weight"] = words["layer.weight"]
        return {name.removeprefix("layer."): t for name, t in tensors.items()}, data.dequantize()

    return write, header
