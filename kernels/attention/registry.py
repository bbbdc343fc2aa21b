"""Attention backends, their priorities, and the choice among them."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernels.attention_args import AttentionArgs, MlaArgs

Forward = Callable[[AttentionArgs], Tensor]
"""`KernelSet.paged_attention`."""
LatentForward = Callable[[MlaArgs], Tensor]
"""`KernelSet.mla_attention`."""
SMALL_SHARED_MEMORY = frozenset({86, 89, 120, 121})
"""Compute capabilities, times ten, with no more than 100 KB of shared memory per block."""


class GraphSupport(enum.IntEnum):
    """The batches in which a backend can be captured in a CUDA graph, in ascending order."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequirements:
    """What a model and its settings require of attention.

    Attributes:
        device: "cpu" or "cuda".
        vendor: a GPU's vendor, "nvidia" or "amd".
        capability: compute capability times ten; None on a CPU and on AMD's GPUs.
        dtype: of activations: "fp16", "bf16" or "fp32".
        kv_dtype: of the cache: the same, "fp8_e4m3", "fp8_e5m2" or "int8".
        latent: for MLA, how many of the `head_size` values of a latent are its value; 0 for
        attention over keys and values.
        attention_type: "decoder", "encoder" or "encoder-decoder".
        window, soft_cap, alibi, distance_bias, sinks, sparse: whether any layer uses these.
        bidirectional: whether tokens of a span, such as a picture's, attend to later ones in it.
    """

    device: str
    vendor: str = "nvidia"
    capability: int | None = None
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    block_size: int = 16
    head_size: int = 128
    latent: int = 0
    attention_type: str = "decoder"
    window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    distance_bias: bool = False
    sinks: bool = False
    sparse: bool = False
    bidirectional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """An implementation of paged attention, and its limits.

    Attributes:
        devices: "cpu", "cuda".
        vendors: of GPUs.
        capability: lowest and highest compute capability times ten; (0, 999) for any.
        kv_dtypes: as in `AttentionRequirements`; "auto" is the activations' dtype.
        block_sizes: supported block sizes; () for multiples of `block_multiple`.
        head_sizes: supported head sizes; () for any up to `max_head_size`.
        latents: maximum values of a latent (half as many in float32 with little shared memory)
        and of its rotated part; () if latents are treated as keys and values.
        package: the required package; "" if torch suffices.
        gpu_package: the package that is required on GPUs only.
        load, load_latents: import and return the functions.
    """

    name: str
    about: str
    devices: tuple[str, ...]
    load: Callable[[], Forward]
    dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32")
    kv_dtypes: tuple[str, ...] = ("auto",)
    block_sizes: tuple[int, ...] = ()
    block_multiple: int = 1
    head_sizes: tuple[int, ...] = ()
    max_head_size: int = 1 << 16
    latents: tuple[int, ...] = ()
    window: bool = True
    soft_cap: bool = True
    alibi: bool = True
    distance_bias: bool = False
    sinks: bool = True
    sparse: bool = False
    bidirectional: bool = False
    attention_types: tuple[str, ...] = ("decoder",)
    vendors: tuple[str, ...] = ("nvidia", "amd")
    capability: tuple[int, int] = (0, 999)
    graphs: GraphSupport = GraphSupport.NEVER
    package: str = ""
    gpu_package: str = ""
    load_latents: Callable[[], LatentForward] | None = None

    def refusals(self, need: AttentionRequirements) -> list[str]:
        """Return why this backend doesn't meet the requirements; empty if it does."""
        reasons = [
            f"{what} not supported"
            for what, good in (
                (f"device {need.device}", need.device in self.devices),
                (
                    f"GPU of {need.vendor.upper()}",
                    need.device != "cuda" or need.vendor in self.vendors,
                ),
                (f"dtype {need.dtype}", need.dtype in self.dtypes),
                (f"KV cache dtype {need.kv_dtype}", self._takes_cache(need)),
                (
                    f"block size {need.block_size}",
                    need.block_size in self.block_sizes
                    if self.block_sizes
                    else need.block_size % self.block_multiple == 0,
                ),
                (_head(need), self._takes_head(need)),
                (
                    f"attention type {need.attention_type}",
                    need.attention_type in self.attention_types,
                ),
                ("sliding window", self.window or not need.window),
                ("soft cap of the scores", self.soft_cap or not need.soft_cap),
                ("ALiBi", self.alibi or not need.alibi),
                ("bias by distance", self.distance_bias or not need.distance_bias),
                ("sinks", self.sinks or not need.sinks),
                ("block-sparse attention", self.sparse or not need.sparse),
                ("bidirectional spans", self.bidirectional or not need.bidirectional),
            )
            if not good
        ]  # fmt: skip
        if need.capability is not None:
            low, high = self.capability
            if not low <= need.capability <= high:
                reasons.append(f"compute capability {need.capability / 10} not supported")
        on_gpu = self.gpu_package if need.device == "cuda" else ""
        for package in filter(None, (self.package, on_gpu)):
            if importlib.util.find_spec(package) is None:
                reasons.append(f"{package} is not installed")
        return reasons

    def _takes_cache(self, need: AttentionRequirements) -> bool:
        return need.kv_dtype in self.kv_dtypes or (
            "auto" in self.kv_dtypes and need.kv_dtype == need.dtype
        )

    def _takes_head(self, need: AttentionRequirements) -> bool:
        size, latent = need.head_size, need.latent
        if latent and self.latents:
            max_latent, max_rotated = self.latents
            if need.dtype == "fp32" and need.capability in SMALL_SHARED_MEMORY:
                max_latent //= 2
            return latent <= max_latent and size - latent <= max_rotated
        return size in self.head_sizes if self.head_sizes else size <= self.max_head_size


def _head(need: AttentionRequirements) -> str:
    if need.latent:
        return f"a latent of {need.latent} values and {need.head_size - need.latent} beside it"
    return f"head size {need.head_size}"


log = logging.getLogger(__name__)

_FP8 = ("fp8_e4m3", "fp8_e5m2")


class NoAttentionBackend(ValueError):
    """No backend meets the requirements, or the requested one doesn't.

    Attributes:
        reasons: each considered backend's reasons.
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
            max_head_size=256,
            bidirectional=True,
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
            vendors=("nvidia",),
            capability=(90, 90),
            package="flash_attn_interface",
        ),
        AttentionBackend(
            name="FLASHINFER",
            about="FlashInfer",
            devices=("cuda",),
            load=lambda: _from("kernels.attention.flashinfer"),
            dtypes=("fp16", "bf16"),
            block_sizes=(16, 32, 64),
            head_sizes=(64, 128, 256),
            alibi=False,
            sinks=False,
            vendors=("nvidia",),
            capability=(80, 109),
            package="flashinfer",
        ),
        AttentionBackend(
            name="ROCM_AITER_UNIFIED_ATTN",
            about="AITER's Triton kernel",
            devices=("cuda",),
            load=lambda: _from("kernels.attention.rocm_aiter"),
            dtypes=("fp16", "bf16"),
            block_multiple=16,
            max_head_size=256,
            alibi=False,
            vendors=("amd",),
            package="aiter",
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
            kv_dtypes=("auto", "bf16", "fp16", "fp32", *_FP8, "int8"),
            distance_bias=True,
            sparse=True,
            bidirectional=True,
        ),
    )
}
BACKENDS["ROCM_ATTN"] = replace(
    BACKENDS["TRITON_ATTN"],
    name="ROCM_ATTN",
    about="TRITON_ATTN by the name that it has in vLLM on AMD's GPUs",
    vendors=("amd",),
)
#: The registered backends; a member may stand wherever a backend's name may.
AttentionBackendEnum = enum.StrEnum("AttentionBackendEnum", {name: name for name in BACKENDS})  # type: ignore[misc]

PRIORITY: dict[str, tuple[str, ...]] = {
    "cuda": (
        "TRITON_ATTN",
        "ROCM_ATTN",
        "FLASH_ATTN",
        "FLASHINFER",
        "ROCM_AITER_UNIFIED_ATTN",
        "FLEX_ATTENTION",
        "TORCH_SDPA",
    ),
    "cpu": ("CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"),
}
"""The order in which backends are tried, by device."""


def register_backend(backend: AttentionBackend) -> None:
    """Register a backend, with the lowest priority on its devices.

    Raises ValueError if another backend has its name.
    """
    if BACKENDS.get(backend.name, backend) is not backend:
        raise ValueError(f"There is an attention backend {backend.name!r} already.")
    BACKENDS[backend.name] = backend
    for device in backend.devices:
        tried = PRIORITY.get(device, ())
        if backend.name not in tried:
            PRIORITY[device] = (*tried, backend.name)


_LATENTS = "Latents are attended to by TRITON_ATTN, on CPUs by CPU_ATTN"
_ONLY_IN_VLLM = {
    "CUTLASS_MLA": f"{_LATENTS}: its kernel is for compute capability 10.x. ",
    "FLASHINFER_MLA": f"{_LATENTS}: its kernel is for compute capability 10.x. ",
    "FLASHMLA": f"{_LATENTS}: its kernel reads blocks of 64 tokens in half precision alone. ",
    "FLASH_ATTN_MLA": f"{_LATENTS}: its kernel is for compute capability 9.x in half precision. ",
    "TRITON_MLA": f"{_LATENTS}. ",
    **dict.fromkeys(
        ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE", "ROCM_AITER_MLA_SPARSE"),
        "It is for the sparse attention of DeepSeek-V3.2, which isn't supported. ",
    ),
    "ROCM_AITER_TRITON_MLA": "Latents are attended to by ROCM_ATTN. ",
    "FLASH_ATTN_DIFFKV": "It is for values of another size than keys. ",
    "ROCM_AITER_FA": "Its kernels for decodes read pages of another layout; "
    "ROCM_AITER_UNIFIED_ATTN is AITER's kernel for prompts and decodes. ",
    "ROCM_AITER_MLA": "Latents are attended to by ROCM_ATTN. ",
    "ROCM_FLASH": "It is ROCM_ATTN by now. ",
    "TREE_ATTN": "It is for trees of drafts; here a draft is one row of tokens. ",
}


def get_backend(name: str) -> AttentionBackend:
    """Return the backend with a name. Raises `NoAttentionBackend` for an unknown name."""
    if name not in BACKENDS:
        raise NoAttentionBackend(
            f"There is no attention backend {name!r}. {_ONLY_IN_VLLM.get(name, '')}"
            f"There are {', '.join(BACKENDS)}; leave it out for the first that fits the model.",
            {},
        )
    return BACKENDS[name]


def select_backend(need: AttentionRequirements, requested: str | None = None) -> AttentionBackend:
    """Return the requested backend, or the first by priority that meets the requirements.

    Raises `NoAttentionBackend` with all reasons if there is none.
    """
    if requested is not None:
        backend = get_backend(requested)
        if reasons := backend.refusals(need):
            names = PRIORITY.get(need.device, ())
            fitting = [name for name in names if not BACKENDS[name].refusals(need)]
            remedy = f" Leave it out, or name {' or '.join(fitting)}." if fitting else ""
            raise NoAttentionBackend(
                f"Attention backend {requested} can't be used here: {'; '.join(reasons)}.{remedy}",
                {requested: reasons},
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
