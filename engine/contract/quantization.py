"""Names of ways to quantise, as the setting `quantization` takes them. Torch-free."""

from __future__ import annotations

#: What weights of any checkpoint are rounded to while they load.
ROUNDED = ("int8", "int4", "fp8")
#: Formats of checkpoints, by vLLM's names, some of which say which kernel runs them: what the
#: checkpoint's own format must be among.
CHECKPOINT_METHODS: dict[str, tuple[str, ...]] = {
    "aqlm": ("aqlm",),
    "auto_awq": ("awq",),
    "auto_gptq": ("gptq",),
    "awq": ("awq",),
    "awq_marlin": ("awq",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fbgemm_fp8": ("fp8",),
    "gguf": ("gguf",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "hqq": ("hqq",),
    "inc": ("awq", "gptq"),
    "ipex": ("awq", "gptq"),
    "modelopt": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "modelopt_mxfp8": ("modelopt",),
    "moe_wna16": ("awq", "gptq"),
    "mxfp4": ("mxfp4",),
    "squeezellm": ("squeezellm",),
    "torchao": ("torchao",),
}
_AT_LOAD = "it rounds plain weights while they load: use int8, or int4 (or fp8 on a GPU)"
#: Those of vLLM's that nothing here reads, and what to take instead.
REFUSED_METHODS = {
    "bitblas": "take the GPTQ checkpoint that it is made of",
    "deepseek_v4_fp8": "take a GPTQ or AWQ checkpoint of the model",
    "deepspeedfp": "it rounds plain weights while they load: use int8 (or fp8 on a GPU)",
    "experts_int8": "it rounds plain weights while they load: use int8",
    "fp8_per_block": _AT_LOAD,
    "fp8_per_channel": _AT_LOAD,
    "fp8_per_tensor": _AT_LOAD,
    "fp_quant": "take the FP8, NVFP4, GPTQ or AWQ checkpoint of the model",
    "gptq_bitblas": "take the GPTQ checkpoint that it is made of",
    "gptq_marlin_24": "take the GPTQ checkpoint that it is made of",
    "humming": "it names kernels of a GPU, not a format: use the checkpoint's own, or leave it out",
    "int8_per_channel_weight_only": _AT_LOAD,
    "marlin": "take the GPTQ checkpoint that it is made of, with gptq",
    "mxfp8": _AT_LOAD,
    "neuron_quant": "it is for another device: use int8",
    "nvfp4_per_token": _AT_LOAD,
    "online": _AT_LOAD,
    "ptpc_fp8": "it rounds plain weights while they load: use fp8 on a GPU, or int8",
    "qqq": "take the GPTQ or the compressed-tensors checkpoint of the model",
    "quark": "take the FP8, GPTQ or AWQ checkpoint of the model",
    "tpu_int8": "it is for another device: use int8",
}
QUANTIZATIONS = (*ROUNDED, *CHECKPOINT_METHODS)
