"""Triton kernels for GPUs; under TRITON_INTERPRET=1 they run on CPU tensors, slowly.

Each operation is one function. `TritonKernels` contains the operations of `KernelSet`; the others
are `attention.merge_attention_states` and the LoRA functions of `group_traffic`.
"""

from kernels.triton.kernel_set import TritonKernels, load

__all__ = ["TritonKernels", "load"]
