"""The backends, in what order they are tried, and the choice among them."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from kernels.attention.backend import AttentionBackend, AttentionNeed, Forward, GraphSupport

log = logging.getLogger(__name__)

_FP8 = ("fp8_e4m3", "fp8_e5m2")


class NoAttentionBackend(ValueError):
    """No backend can do what is asked, or the one that is wanted can't.

    Attributes:
        reasons: of each backend that was considered.
    """

    def __init__(self, message: str, reasons: dict[str, list[str]]) -> None:
        super().__init__(message)
        self.reasons = reasons


def _from(module: str, name: str = "paged_attention") -> Any:
    return getattr(importlib.import_module(module), name)


def _cpu_attention() -> Forward:
    import kernels

    return kernels.get("cpu").paged_attention


BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (
        AttentionBackend(
            name="TRITON_ATTN",
            about="Quire's own kernels, in Triton",
            devices=("cuda",),
            load=lambda: _from("kernels.triton.attention"),
            kv_dtypes=("auto", "bf16", "fp16", *_FP8, "int8"),
            block_multiple=4,
            most_head_size=256,
            latents=(512, 128),
            load_latents=lambda: _from("kernels.triton.attention", "latent_attention"),
            capability=(80, 999),
            graphs=GraphSupport.ALWAYS,
            package="triton",
        ),
        AttentionBackend(
            name="FLASH_ATTN",
            about="FlashAttention 3",
            devices=("cuda",),
            load=lambda: _from("kernels.attention.flash"),
            dtypes=("fp16", "bf16"),
            block_multiple=16,
            head_sizes=(64, 96, 128, 192, 256),
            alibi=False,
            sinks=False,
            capability=(90, 90),
            package="flash_attn_interface",
        ),
        AttentionBackend(
            name="FLASHINFER",
            about="FlashInfer",
            devices=("cuda",),
            load=lambda: _from("kernels.attention.infer"),
            dtypes=("fp16", "bf16"),
            block_sizes=(16, 32, 64),
            head_sizes=(64, 128, 256),
            alibi=False,
            sinks=False,
            capability=(80, 109),
            package="flashinfer",
        ),
        AttentionBackend(
            name="FLEX_ATTENTION",
            about="torch's flex attention over gathered pages",
            devices=("cpu", "cuda"),
            load=lambda: _from("kernels.attention.flex"),
            kv_dtypes=("auto", "bf16", "fp16", "fp32"),
            sinks=False,
            gpu_package="triton",
        ),
        AttentionBackend(
            name="TORCH_SDPA",
            about="torch's scaled dot product attention over gathered pages",
            devices=("cpu", "cuda"),
            load=lambda: _from("kernels.attention.sdpa"),
            kv_dtypes=("auto", "bf16", "fp16", "fp32"),
            soft_cap=False,
            sinks=False,
        ),
        AttentionBackend(
            name="CPU_ATTN",
            about="Quire's own kernels, in C++",
            devices=("cpu",),
            load=_cpu_attention,
            kv_dtypes=("auto", "bf16", "fp16", "fp32", "int8"),
            sparse=True,
        ),
    )
}

PRIORITY: dict[str, tuple[str, ...]] = {
    "cuda": ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TORCH_SDPA"),
    "cpu": ("CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"),
}
"""In which order backends are tried, by device."""


def register_backend(backend: AttentionBackend) -> None:
    """Add a backend, tried after the others of its devices.

    Raises ValueError where its name is taken by another one.
    """
    if BACKENDS.get(backend.name, backend) is not backend:
        raise ValueError(f"There is an attention backend {backend.name!r} already.")
    BACKENDS[backend.name] = backend
    for device in backend.devices:
        tried = PRIORITY.get(device, ())
        if backend.name not in tried:
            PRIORITY[device] = (*tried, backend.name)


def get_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises `NoAttentionBackend` for one that isn't known."""
    if name not in BACKENDS:
        raise NoAttentionBackend(
            f"There is no attention backend {name!r}; there are {', '.join(BACKENDS)}.", {}
        )
    return BACKENDS[name]


def select_backend(need: AttentionNeed, wanted: str | None = None) -> AttentionBackend:
    """The backend that is wanted, or the first by priority that does what is asked.

    Raises `NoAttentionBackend`, with all reasons, where there is none.
    """
    if wanted is not None:
        backend = get_backend(wanted)
        if reasons := backend.refusals(need):
            raise NoAttentionBackend(
                f"Attention backend {wanted} can't be used here: {'; '.join(reasons)}.",
                {wanted: reasons},
            )
        return backend
    refused: dict[str, list[str]] = {}
    for name in PRIORITY.get(need.device, ()):
        refused[name] = BACKENDS[name].refusals(need)
        if not refused[name]:
            log.info("Attention backend: %s, %s", name, BACKENDS[name].about)
            return BACKENDS[name]
    listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    raise NoAttentionBackend(f"No attention backend fits. {listed or need.device}.", refused)
