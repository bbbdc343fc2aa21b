"""The optimisations of a CPU, each with the switch that turns it off. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of itself.

    Attributes:
        kernels: name of its kernels.
        dtype: of its weights.
        quantization: of its weights.
        experts: whether the model has any.
    """

    kernels: str
    dtype: str
    quantization: str | None
    experts: bool

    @property
    def compiled(self) -> bool:
        """Whether the compiled CPU kernels run it."""
        return self.kernels.startswith("cpu-")


def _anywhere(facts: Facts) -> str:
    return ""


def _compiled(facts: Facts) -> str:
    return "" if facts.compiled else f"{facts.kernels} kernels run this model"


def _with_experts(facts: Facts) -> str:
    return _compiled(facts) or ("" if facts.experts else "the model has no experts")


def _on_avx512(facts: Facts) -> str:
    wide = facts.kernels.startswith("cpu-avx512")
    return "" if wide else f"{facts.kernels} kernels have nothing wider to turn off"


def _with_pairs(facts: Facts) -> str:
    plain = facts.dtype == "bfloat16" and facts.quantization is None
    if not plain:
        return "the weights aren't bfloat16 (--dtype bfloat16)"
    return "" if facts.kernels == "cpu-avx512" else f"{facts.kernels} kernels never round them"


def _with_integers(facts: Facts) -> str:
    if facts.quantization is None and facts.dtype != "bfloat16":
        return "the weights are neither bfloat16 nor quantised"
    return "" if facts.kernels == "cpu-avx512" else f"{facts.kernels} kernels don't use them"


@dataclass(frozen=True, slots=True)
class Part:
    """An optimisation.

    Attributes:
        what: in words.
        switch: how a user turns it off, or on where it's off by itself.
        loads: those that show it.
        with_, without: engine settings, over those that the user gave.
        environment: variables of the engine without it.
        refuses: why it can't be shown with an engine; "": it can.
    """

    what: str
    switch: str
    loads: tuple[str, ...]
    with_: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    refuses: Callable[[Facts], str] = _anywhere


def _flag(
    name: str,
    what: str,
    *loads: str,
    refuses: Callable[[Facts], str] = _anywhere,
) -> Part:
    """A setting that is on by default."""
    return Part(
        what, f"--no-{name.replace('_', '-')}", loads, without={name: False}, refuses=refuses
    )


def _switch(name: str, what: str, *loads: str, refuses: Callable[[Facts], str] = _compiled) -> Part:
    """One of `kernels.ablations.NAMES`, and of `PARTS`."""
    variable = "QUIRE_ABLATIONS"
    return Part(what, f"{variable}={name}", loads, environment={variable: name}, refuses=refuses)


def _isa(isa: str, what: str, *loads: str, refuses: Callable[[Facts], str]) -> Part:
    name = "QUIRE_CPU_ISA"
    return Part(what, f"{name}={isa}", loads, environment={name: isa}, refuses=refuses)


def _rounded(bits: int, *loads: str) -> Part:
    name = f"int{bits}"
    return Part(
        f"{bits}-bit weights",
        f"--quantization {name}",
        loads,
        with_={"quantization": name},
        without={"quantization": None},
    )


PARTS: dict[str, Part] = {
    "kernels": _flag(
        "cpu_kernels", "compiled CPU kernels, beside plain torch", "one", refuses=_compiled
    ),
    "avx512": _isa("avx2", "AVX-512, beside AVX2", "one", "many", refuses=_on_avx512),
    "vnni-bf16": _isa(
        "avx512_core",
        "instructions for 8-bit and bfloat16 products",
        "one",
        "many",
        refuses=_with_integers,
    ),
    "decoder": _switch("decoder", "all layers in one call", "one"),
    "step": _switch("step", "a whole decode step in one call", "one", "eight"),
    "experts": _switch(
        "experts", "experts in one call, and all layers with them", "one", "many",
        refuses=_with_experts,
    ),
    "sampling": _switch("sampling", "tokens chosen by the kernels", "one", "sampled"),
    "rounding": _flag(
        "round_activations",
        "activations rounded to bfloat16 beside such weights",
        "one",
        "many",
        refuses=_with_pairs,
    ),
    "int8": _rounded(8, "one", "many"),
    "int4": _rounded(4, "one", "many"),
    "kv-int8": Part(
        "8-bit KV cache",
        "--kv-cache-dtype int8",
        ("long",),
        with_={"kv_cache_dtype": "int8"},
        without={"kv_cache_dtype": "auto"},
        refuses=_compiled,
    ),
    "prefetch": _switch(
        "prefetch", "weights and KV fetched ahead", "one", "eight", "long", "many"
    ),
    "huge-pages": _switch("huge-pages", "memory in huge pages", "one", "long", "many"),
    "dealing": _switch(
        "dealing", "work dealt to whichever thread is free", "one", "eight", "many"
    ),
    "spinning": _switch("spinning", "idle threads look for work before they sleep", "one"),
    "split-kv": _switch("split-kv", "a sequence's KV split over threads", "long"),
    "even-tiles": _switch("even-tiles", "a product's rows in even tiles", "many"),
    "shared-pages": _switch("shared-pages", "small matrices in huge pages", "one", "many"),
    "kv-ahead": _switch("kv-ahead", "new pages of the KV cache mapped ahead", "rested", "many"),
    "map-ahead": _switch(
        "map-ahead", "pages of the KV cache mapped while a replica is idle", "rested"
    ),
    "own-runs": _switch(
        "own-runs", "each thread in a run of weights of its own, few rows", "one", "eight"
    ),
    "shared-loading": _switch("shared-loading", "a product's rows loaded by all threads", "many"),
    "last-rows": _switch("last-rows", "only wanted tokens after the last attention", "prompt"),
    "binding": Part(
        "threads kept apart, each on a CPU",
        "--cpu-threads-bind nobind",
        ("one",),
        without={"cpu_threads_bind": "nobind"},
        refuses=_compiled,
    ),
    "chunked-prefill": _flag("enable_chunked_prefill", "long prompts split over steps", "beside"),
    "prefill-share": Part(
        "a bounded share of a step for prompts beside decodes",
        "--prefill-tokens-beside-decodes 0",
        ("beside", "many"),
        without={"prefill_tokens_beside_decodes": 0},
    ),
    "prefill-by-load": _switch(
        "prefill-by-load", "that share by the number of decodes", "beside", "many",
        refuses=_anywhere,
    ),
    "prefill-least": _switch(
        "prefill-least", "steps of few decodes filled up with prompts", "first", "beside",
        refuses=_anywhere,
    ),
    "overtaking": Part(
        "short prompts ahead of long ones, for a bounded time",
        "--prompt-overtaking 0",
        ("burst", "burst-mean"),
        without={"prompt_overtaking": 0.0},
    ),
    "prefix-caching": _flag("enable_prefix_caching", "KV of shared prefixes reused", "shared"),
}  # fmt: skip


def chosen(names: str | None, loads: str | None = None) -> dict[str, Part]:
    """The parts that are named, with commas between, under the loads that are; all by default.

    Raises `ConfigError` for a name that there isn't.
    """
    known = dict.fromkeys(load for part in PARTS.values() for load in part.loads)
    shown = known if loads is None else _named(loads, known, "load")
    parts = PARTS if names is None else {name: PARTS[name] for name in _named(names, PARTS, "part")}
    found = {
        name: replace(part, loads=tuple(load for load in part.loads if load in shown))
        for name, part in parts.items()
    }
    return {name: part for name, part in found.items() if part.loads}


def _named(text: str, known: Collection[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            there = ", ".join(known)
            raise ConfigError(f"There is no {what} {name!r}; there are {there}.", param=what)
    return names
