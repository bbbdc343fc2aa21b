"""Triton kernels for GPUs; under TRITON_INTERPRET=1 they run on CPU tensors, slowly.

One function an operation. Those of `KernelSet` are in `TritonKernels`; beside them there are
`attention.merge_attention_states` and what `group_traffic` has for LoRA.
"""

from kernels.triton.kernel_set import TritonKernels, load

__all__ = ["TritonKernels", "load"]
