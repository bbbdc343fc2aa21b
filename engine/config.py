"""`EngineConfig`: every setting of one replica, typed and validated. Torch-free.

Made from keywords (`EngineConfig(model=...)`), from command-line flags (`add_cli_args`,
`from_cli_args`) or from a mapping such as Django settings (`from_mapping`). Names and defaults are
vLLM's where the thing exists here.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.options import Settings, add_flag, checked, option

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
MODEL_IMPLS = ("auto", "quire", "transformers")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
QUANTIZATIONS = ("int8", "int4", "fp8")
DEVICES = ("auto", "cpu", "cuda")
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
POLICIES = ("fair", "fcfs", "priority")
KV_DTYPES = (
    "auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
)  # fmt: skip


@dataclass(kw_only=True)
class EngineConfig(Settings):
    """Settings of one replica. Raises `ConfigError` (with `param`) when one is out of its range."""

    model: str = option("", "model folder, or hub id when a hub is in reach")
    tokenizer: str | None = option(None, "tokenizer folder; default: the model's")
    skip_tokenizer_init: bool = option(False, "load no tokenizer; prompts must be token ids")
    served_model_name: str | None = option(None, "name that clients use; default: the model's")
    trust_remote_code: bool = option(False, "run Python code that a model folder brings")
    model_impl: str = option(
        "auto",
        "who runs the model: the native decoder (quire), the Transformers bridge, or the first "
        "that can",
        choices=MODEL_IMPLS,
    )
    hf_overrides: dict[str, Any] | None = option(  # noqa: RUF009
        None, "JSON that is put over the model's config.json", json=True
    )
    revision: str | None = option(None, "branch, tag or commit on the hub")
    download_dir: str | None = option(None, "where downloads go; default: the hub's cache")
    runner: str = option(
        "auto",
        "generate text, or give vectors, labels and scores; auto: by the model",
        choices=RUNNERS,
    )
    convert: str = option("auto", "adapt a model that wasn't made for pooling", choices=CONVERSIONS)
    pooler_config: dict[str, Any] | None = option(  # noqa: RUF009
        None,
        "JSON: pooling_type (CLS, LAST, MEAN), use_activation, dimensions of a pooling model",
        json=True,
    )
    load_format: str = option("auto", "how weights are read", choices=LOAD_FORMATS)
    dtype: str = option(
        "auto",
        "of the weights (activations are float32 on a CPU); auto: the checkpoint's",
        choices=DTYPES,
    )
    quantization: str | None = option(
        None,
        "round the weights to 8 or 4 bits while they load (fp8: on a GPU); default: as the "
        "checkpoint has them",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = option("auto", "KV cache; auto: the model's", choices=KV_DTYPES)
    calculate_kv_scales: bool = option(
        False,
        "measure the scales of an fp8 KV cache on a sample text at load, where the checkpoint has "
        "none; otherwise they are 1",
    )
    max_model_len: int | None = option(None, "context length; default: the model's", low=1)
    block_size: int = option(16, "tokens in a KV block", choices=(4, 8, 16, 32, 64, 128))
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of shared prefixes")
    disable_hybrid_kv_cache_manager: bool = option(
        False, "keep all KV blocks of sliding-window layers, as of any other layer"
    )
    disable_sliding_window: bool = option(
        False, "attend to everything and cap the context to the window"
    )
    seed: int = option(0, "seed of requests that bring none", low=0)
    cpu_kvcache_space: float | None = option(
        None,
        "GiB of KV cache on a CPU; default: a quarter of free memory, at most 4",
        low=0.0001,
        high=1048576.0,
    )
    kv_cache_map_ahead: int = option(
        512,
        "MiB of KV cache whose pages a serving replica on a CPU has mapped before they are needed, "
        "when cores are idle; 0: none",
        low=0,
    )
    num_gpu_blocks_override: int | None = option(
        None, "exactly this many KV blocks, whatever the memory", low=1, high=1 << 24
    )
    max_num_batched_tokens: int | None = option(
        None, "token budget of one step; default: 512 on a CPU, 8192 on a GPU", low=1
    )
    max_num_seqs: int = option(256, "most sequences in one step", low=1, high=65536)
    async_scheduling: bool | None = option(
        None,
        "plan a step and deliver the one before while one is being run; default: on a GPU; on a "
        "CPU the model needs the cores itself",
    )
    kept_seats_fraction: float = option(
        1 / 16,
        "part of max_num_seqs that tenants over their share leave to others who were here in the "
        "last ten minutes, so that these start at once (fair policy)",
        low=0.0,
        high=0.5,
    )
    max_waiting: int = option(16384, "most queued requests; more are refused with 429", low=1)
    enable_prompt_embeds: bool = option(
        False, "take prompts as embedding vectors (offline); trusted callers only"
    )
    max_logprobs: int = option(20, "most logprobs a request may ask for", low=0, high=1000)
    enable_chunked_prefill: bool = option(True, "split long prompts over steps")
    prefill_tokens_beside_decodes: int | None = option(
        None,
        "most prompt tokens of one step in which others decode, so that streams don't stutter; "
        "0: the budget; default: when serving on a CPU by the load, at most 0.09 s of work; else 0",
        low=0,
    )
    prefill_full_share_at: int = option(
        64,
        "sequences that decode in a step from which on prompts get all of these 0.09 s; with fewer "
        "they get their part, more when many prompts wait; 0: always all",
        low=0,
    )
    prefill_least_tokens: int = option(
        72,
        "tokens that such a step is filled up to with prompts, decodes included, where up to 9 "
        "sequences decode, if that doesn't take 0.09 s, and in proportion where more do even so",
        low=1,
    )
    long_prefill_token_threshold: int = option(
        0, "most prompt tokens of one request in one step; 0: the budget", low=0
    )
    scheduling_policy: str = option(
        "fair",
        "order of the waiting queue; fair: shares between tenants, by their weights",
        choices=POLICIES,
    )
    prompt_overtaking: float = option(
        4.0,
        "under the fair policy a tenant's shorter prompts go ahead of longer ones that wait, until "
        "so many times the longer one's tokens were served since it came; 0: by arrival",
        low=0.0,
    )
    device: str = option("auto", "where the model runs", choices=DEVICES)
    attention_backend: str | None = option(
        None,
        "what computes attention, see docs/attention-backends.md; default: the first that fits",
    )
    enforce_eager: bool = option(False, "no CUDA graphs on a GPU")
    cudagraph_mode: str | None = option(
        None,
        "what is captured in CUDA graphs on a GPU; default: by the optimization level",
        choices=CUDAGRAPH_MODES,
    )
    cudagraph_capture_sizes: list[int] | None = option(  # noqa: RUF009
        None,
        "numbers of tokens that CUDA graphs are captured for; default: by max_num_seqs; no more "
        "than fit the memory kept for graphs",
        low=1,
        high=8192,
    )
    optimization_level: int = option(
        2,
        "start-up time against speed on a GPU: the default of cudagraph_mode; 0: NONE, 1: "
        "PIECEWISE, 2: FULL_AND_PIECEWISE, 3: as 2",
        short="-O",
        low=0,
        high=3,
    )
    gpu_memory_utilization: float = option(
        0.9, "part of a GPU's memory that weights, activations and KV cache may take", low=0.01,
        high=1.0,
    )  # fmt: skip
    split_mixed_batches: bool = option(
        True,
        "on a GPU, attend to sequences that decode beside prompts by a kernel call of their own",
    )
    enable_sleep_mode: bool = option(
        False, "an operator may send the model to sleep, which gives its memory back for a while"
    )
    num_threads: int | None = option(
        None, "CPU threads of the engine; default: all cores", low=1, high=4096
    )
    cpu_threads_bind: str = option(
        "auto",
        "CPUs of the engine's threads, one each, such as 0-3,8; auto: the pool keeps them apart; "
        "nobind: the system decides",
    )
    cpu_kernels: bool = option(True, "use the compiled CPU kernels; off: plain torch")
    compiled_decoder: bool = option(
        True, "run a model's layers in one call where the kernels can; off: one by one"
    )
    compiled_experts: bool = option(
        True,
        "on a CPU, run a mixture of experts in one call where the kernels can; off: expert by "
        "expert, and then layer by layer",
    )
    round_activations: bool = option(
        True,
        "multiply bfloat16 weights with activations rounded to bfloat16, as such a model was "
        "trained, where the CPU has instructions for it; off: with float32",
    )
    compiled_sampling: bool = option(
        True, "choose tokens with the compiled CPU kernels; off: with torch"
    )
    compiled_step: bool = option(
        True,
        "where sequences only decode, run embedding, layers, output layer and choice in one call "
        "of the compiled CPU kernels; off: one after the other",
    )
    rope_scaling: dict[str, Any] | None = option(  # noqa: RUF009
        None, "JSON that replaces the model's", json=True
    )
    rope_theta: float | None = option(None, "replaces the model's rope_theta", low=1.0)
    generation_config: str = option(
        "auto",
        "auto: sampling defaults of the model's generation_config.json; vllm: none",
        choices=("auto", "vllm"),
    )
    tool_call_parser: str | None = option(
        None, "how gateways read tool calls; default: told by the chat template"
    )
    reasoning_parser: str | None = option(
        None, "how gateways find reasoning; none: not at all; default: told by the chat template"
    )
    disable_log_stats: bool = option(False, "no periodic line of statistics")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            setattr(self, spec.name, checked(spec, getattr(self, spec.name)))
        if not self.enable_chunked_prefill and self.max_num_batched_tokens is not None:
            limit = self.max_model_len
            if limit is not None and self.max_num_batched_tokens < limit:
                raise ConfigError(
                    f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                    f"max_model_len ({limit}) when chunked prefill is off.",
                    param="max_num_batched_tokens",
                )
        if self.max_num_batched_tokens is not None and (
            self.max_num_batched_tokens < self.max_num_seqs and self.max_num_seqs == 256
        ):
            # A small explicit budget with the default number of sequences: the budget wins.
            self.max_num_seqs = self.max_num_batched_tokens

    @property
    def kept_seats(self) -> int:
        """Places in a step that tenants over their share leave to others."""
        if self.scheduling_policy != "fair":
            return 0
        return int(self.kept_seats_fraction * self.max_num_seqs)

    def plans_ahead(self, device: str) -> bool:
        """`async_scheduling`, resolved for "cpu" or "cuda"."""
        return device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model


def add_cli_args(parser: argparse.ArgumentParser, *, skip: frozenset[str] = frozenset()) -> None:
    """One flag a setting, `--like-this`; booleans also take `--no-like-this`; `-O2` as vLLM's."""
    group = parser.add_argument_group("engine settings")
    for spec in dataclasses.fields(EngineConfig):
        if spec.name in skip:
            continue
        add_flag(group, spec)
