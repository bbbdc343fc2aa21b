"""`python -m tools.document`: write docs/attention-backends.md from the registry."""

from __future__ import annotations

from pathlib import Path

from kernels.attention.registry import BACKENDS, PRIORITY, AttentionBackend

PAGE = Path(__file__).resolve().parents[1] / "docs" / "attention-backends.md"

HEAD = """# Attention backends

Written by `python -m tools.document` from `kernels/attention/registry.py`; a test
compares them.

`--attention-backend NAME` forces one; a backend that can't do what the model and its settings ask
for is refused with all reasons. Otherwise they are tried in this order, and the first that fits is
taken:
"""
LEGEND = """
KV dtype `auto` is that of the activations. A block size `%N` is any multiple of N. CUDA graphs: in
which batches a backend can be captured whole, see [GPU kernels](gpu-kernels.md). Latents
(DeepSeek's MLA) are of up to so many values, with so many beside them; backends that name none
attend over them as over heads of as many keys and values. FLASH_ATTN and FLASHINFER call libraries
that Quire doesn't install; our calls are tested against stand-ins of their documented functions,
not yet against the libraries on a GPU.
"""
COLUMNS = (
    "Backend", "Device", "Dtypes", "KV dtypes", "Block sizes", "Head sizes", "Window", "Soft cap",
    "ALiBi", "Sinks", "Block-sparse", "Attention types", "Compute cap.", "CUDA graphs", "Needs",
)  # fmt: skip


def _range(backend: AttentionBackend) -> str:
    low, high = backend.capability
    if "cuda" not in backend.devices:
        return "N/A"
    if high == 999:
        return f"≥{low / 10}" if low else "any"
    return f"{low / 10}" if low == high else f"{low / 10}-{high // 10}.x"


def _row(backend: AttentionBackend) -> tuple[str, ...]:
    def mark(can: bool) -> str:
        return "✅" if can else "❌"

    multiple = f"%{backend.block_multiple}" if backend.block_multiple > 1 else "any"
    sizes = ", ".join(str(size) for size in backend.head_sizes)
    if not sizes:
        sizes = "any" if backend.most_head_size > 1024 else f"up to {backend.most_head_size}"
    if backend.latents:
        sizes += "; latents up to " + " + ".join(str(most) for most in backend.latents)
    return (
        backend.name,
        ", ".join(backend.devices),
        ", ".join(backend.dtypes),
        ", ".join(backend.kv_dtypes),
        ", ".join(str(size) for size in backend.block_sizes) or multiple,
        sizes,
        mark(backend.window),
        mark(backend.soft_cap),
        mark(backend.alibi),
        mark(backend.sinks),
        mark(backend.sparse),
        ", ".join(backend.attention_types),
        _range(backend),
        backend.graphs.name,
        f"`{backend.package}`" if backend.package else _gpu_package(backend),
    )


def _gpu_package(backend: AttentionBackend) -> str:
    return f"on cuda `{backend.gpu_package}`" if backend.gpu_package else ""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    lines += [f"- {device}: {', '.join(names)}" for device, names in PRIORITY.items()]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_row(backend))} |" for backend in BACKENDS.values()]
    lines += ["", *(f"- {b.name}: {b.about}." for b in BACKENDS.values())]
    return "\n".join(lines) + "\n" + LEGEND


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
