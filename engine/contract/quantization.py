"""Names of ways to quantise, as the setting `quantization` takes them. Torch-free."""

from __future__ import annotations

#: What weights of any checkpoint are rounded to while they load.
ROUNDED = ("int8", "int4", "fp8")
#: Formats of checkpoints, by vLLM's names, some of which say which kernel runs them: what the
#: checkpoint's own format must be among.
CHECKPOINT_METHODS: dict[str, tuple[str, ...]] = {
    "aqlm": ("aqlm",),
    "awq": ("awq",),
    "awq_marlin": ("awq",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fbgemm_fp8": ("fp8",),
    "gguf": ("gguf",),
    "gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "hqq": ("hqq",),
    "ipex": ("awq", "gptq"),
    "modelopt": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "moe_wna16": ("awq", "gptq"),
    "mxfp4": ("mxfp4",),
    "squeezellm": ("squeezellm",),
    "torchao": ("torchao",),
}
#: Those of vLLM's that nothing here reads, and what to take instead.
REFUSED_METHODS = {
    "bitblas": "take the GPTQ checkpoint that it is made of",
    "deepspeedfp": "it rounds plain weights while they load: use int8 (or fp8 on a GPU)",
    "experts_int8": "it rounds plain weights while they load: use int8",
    "gptq_bitblas": "take the GPTQ checkpoint that it is made of",
    "gptq_marlin_24": "take the GPTQ checkpoint that it is made of",
    "marlin": "take the GPTQ checkpoint that it is made of, with gptq",
    "neuron_quant": "it is for another device: use int8",
    "ptpc_fp8": "it rounds plain weights while they load: use fp8 on a GPU, or int8",
    "qqq": "take the GPTQ or the compressed-tensors checkpoint of the model",
    "quark": "take the FP8, GPTQ or AWQ checkpoint of the model",
    "tpu_int8": "it is for another device: use int8",
}
QUANTIZATIONS = (*ROUNDED, *CHECKPOINT_METHODS)
