"""`EngineConfig`: every setting of one replica, typed and validated. Torch-free.

It is built from keywords (`EngineConfig(model=...)`), from command-line flags (`add_cli_args`,
`from_cli_args`) or from a mapping such as Django settings (`from_mapping`). Names and defaults are
vLLM's wherever it has the same setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.checkpoint_options import (
    LOAD_FORMATS,
    OTHER_FORMATS,
    QUANTIZATIONS,
    REFUSED_METHODS,
    SAME_FORMATS,
    SAME_METHODS,
    check_overrides,
    resolve_load_format,
    resolve_quantization,
)
from engine.contract.command_line import (
    add_flag,
    add_vllm_flag,
    cli_field,
    validate_field,
)
from engine.contract.config_checks import check_kv_scales, check_kv_tiers, check_media_limits
from engine.contract.eplb_config import EPLBConfig
from engine.contract.errors import ConfigError
from engine.contract.kv_events_config import KVEventsConfig
from engine.contract.kv_transfer_config import (
    EC_PRODUCER,
    KV_PRODUCER,
    NATIVE,
    PREEMPTION_MODES,
    ECTransferConfig,
    KVTransferConfig,
)
from engine.contract.observability import TRACES_VARIABLE as VARIABLE
from engine.contract.observability import check_endpoint
from engine.contract.plugins import check_additional_config, check_device
from engine.contract.speculative_config import SpeculativeConfig
from engine.contract.vllm_flags import VLLM_FLAGS, translate_vllm_settings
from engine.contract.vllm_variables import settings_from_variables

DEFAULT_NUM_SEQS = 256
MAX_RANKS = 64
#: CPUs attend to tiles of so many tokens, of which ranks have whole ones.
_TILE_TOKENS = 128
#: Decoding each costs time before its tokens can be counted, so this limit applies to any context.
MAX_MEDIA_PER_PROMPT = {"image": 64, "video": 8, "audio": 16}
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
MODEL_IMPLS = ("auto", "quire", "transformers")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
EXECUTOR_BACKENDS = ("mp", "uni", "ray", "external_launcher")
POLICIES = ("fair", "fcfs", "priority")
KV_DTYPES = (
    "auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
)  # fmt: skip


@dataclass(kw_only=True)
class EngineConfig:
    """Settings of one replica. Raises `ConfigError` (with `param`) for a value out of range."""

    model: str = cli_field("", "model folder, or hub id when a hub is in reach")
    tokenizer: str | None = cli_field(
        None, "tokenizer folder, or hub id when a hub is in reach; default: the model's"
    )
    tokenizer_revision: str | None = cli_field(
        None, "branch, tag or commit of the tokenizer on the hub"
    )
    skip_tokenizer_init: bool = cli_field(False, "load no tokenizer; prompts must be token ids")
    served_model_name: str | None = cli_field(
        None, "name that clients use; default: the model's", several=True
    )
    trust_remote_code: bool = cli_field(False, "run Python code that a model folder brings")
    model_impl: str = cli_field(
        "auto",
        "which code runs the model: quire (the native decoder), transformers (any causal model, "
        "slower), or auto: the native decoder where it knows the model",
        choices=MODEL_IMPLS,
    )
    hf_overrides: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None, "JSON whose values replace those of the model's config.json", json=True
    )
    revision: str | None = cli_field(None, "branch, tag or commit on the hub")
    download_dir: str | None = cli_field(None, "where downloads go; default: the hub's cache")
    runner: str = cli_field(
        "auto",
        "what the model does: generate text, or pooling (vectors, labels, scores); auto: told by "
        "its config.json",
        choices=RUNNERS,
    )
    convert: str = cli_field(
        "auto",
        "what a pooling model gives: embed (vectors) or classify (labels, scores); a model that "
        "generates text becomes one by it; auto: told by the model",
        choices=CONVERSIONS,
    )
    pooler_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON: pooling_type (CLS, LAST, MEAN), use_activation, dimensions of a pooling model",
        json=True,
    )
    load_format: str = cli_field(
        "auto",
        "how weights are read; auto: safetensors or GGUF; see docs/models.md",
        choices=LOAD_FORMATS,
        refused=OTHER_FORMATS,
        same=SAME_FORMATS,
    )
    model_loader_extra_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON for load_format: sharded_state's pattern, tensorizer's tensorizer_uri",
        json=True,
    )
    dtype: str = cli_field(
        "auto",
        "number format of the weights; auto: the checkpoint's. Activations are float32 on a CPU",
        choices=DTYPES,
    )
    quantization: str | None = cli_field(
        None,
        "int8, int4, fp8 or, of unquantized weights, bitsandbytes (nf4): round them while they "
        "load. Names of checkpoint formats (awq, gptq ...) must be the checkpoint's own. Default: "
        "as the checkpoint has them",
        choices=QUANTIZATIONS,
        refused=REFUSED_METHODS,
        same={**{name.upper(): name for name in QUANTIZATIONS}, **SAME_METHODS},
        short="-q",
    )
    kv_cache_dtype: str = cli_field(
        "auto", "number format of the KV cache; auto: the model's", choices=KV_DTYPES
    )
    mamba_ssm_cache_dtype: str = cli_field(
        "auto",
        "number format of the states of recurrent layers, which are rounded after each token; "
        "auto: float32",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    batch_invariant: bool = cli_field(
        False,
        "on a GPU: make logits the same to the bit whatever else is in the batch and however "
        "prompts are cut, at the price of speed; on a CPU they always are, and attention stays in "
        "float32",
    )
    calculate_kv_scales: bool = cli_field(
        False,
        "measure the scales of an fp8 KV cache on a sample text at load, where the checkpoint has "
        "none; otherwise they are 1",
    )
    quantization_param_path: str | None = cli_field(
        None,
        "JSON file with the scales of an e4m3 KV cache by layer, as vLLM's tools write it; "
        "default: the checkpoint's",
    )
    max_model_len: int | None = cli_field(
        None, "context length; default, auto or -1: the model's", low=1, auto=True
    )
    block_size: int = cli_field(
        16,
        "tokens in a KV block; more than 128 on CPUs alone; with decode_context_parallel_size at "
        "least 128 for each rank",
        choices=tuple(2**exponent for exponent in range(2, 14)),
    )
    enable_prefix_caching: bool = cli_field(True, "reuse the KV blocks of shared prefixes")
    disable_hybrid_kv_cache_manager: bool = cli_field(
        False, "keep the KV blocks of sliding-window layers for the whole context"
    )
    disable_sliding_window: bool = cli_field(
        False, "ignore sliding windows: the context is then no longer than the window"
    )
    enable_lora: bool = cli_field(True, "serve LoRA adapters")
    max_loras: int | None = cli_field(
        None,
        "LoRA adapters on the device at once; default: as many as its memory takes, on a GPU at "
        "most 256",
        low=1,
    )
    max_lora_rank: int | None = cli_field(
        None, "refuse LoRA adapters of a higher rank; default: any rank, on a GPU 256", low=1
    )
    max_cpu_loras: int | None = cli_field(
        None,
        "LoRA adapters kept in host memory, ready to go to the device; default: as many as fit "
        "into a 32nd of free memory, at most 1 GiB",
        low=1,
    )
    lora_dtype: str = cli_field(
        "auto",
        "number format of LoRA weights; auto: as in their files; on a GPU the model's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int = cli_field(0, "seed of requests that set none", low=0)
    cpu_kvcache_space: float | None = cli_field(
        None,
        "GiB of KV cache and of cached states on a CPU; default: a quarter of free memory, up to 4",
        low=0.0001,
        high=1048576.0,
    )
    num_gpu_blocks_override: int | None = cli_field(
        None, "exactly this many KV blocks, whatever the memory", low=1, high=1 << 24
    )
    swap_space: float = cli_field(
        0.0,
        "GiB of host memory for the KV blocks of preempted sequences; 0: they are computed again",
        low=0.0,
        high=1048576.0,
    )
    preemption_mode: str | None = cli_field(
        None,
        "recompute: preempted sequences are computed again; swap: they are read from swap_space; "
        "default: swap where there is a swap_space",
        choices=PREEMPTION_MODES,
    )
    kv_offloading_size: float = cli_field(
        0.0,
        "GiB of KV blocks kept outside the KV cache for later prompts; 0: none",
        low=0.0,
        high=1048576.0,
    )
    kv_offloading_backend: str = cli_field(
        NATIVE,
        "where kv_offloading_size is: native, in host memory; a folder, which replicas of one "
        "machine share and which survives a restart; for all machines redis://HOST:PORT or "
        "s3://BUCKET/PREFIX (needs the extra s3); or tcp://HOST:PORT, memory that decode replicas "
        "read there; see docs/kv-tiers.md",
    )
    kv_transfer_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON of the connector that saves and loads KV blocks: kv_connector, kv_role, "
        "kv_connector_module_path, kv_connector_extra_config; default: none, or with a "
        "kv_offloading_size or swap_space OffloadingConnector",
        json=True,
        check=KVTransferConfig.from_mapping,
    )
    ec_transfer_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON of what saves and loads outputs of encoders where KV blocks are: ec_connector, "
        "ec_role; default: nothing does",
        json=True,
        check=ECTransferConfig.from_mapping,
    )
    kv_events_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON of where ZeroMQ publishes changes of the prefix cache: enable_kv_cache_events, "
        "publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic (needs the "
        "extra kv-events); see docs/prefix-caching.md; default: nowhere",
        json=True,
        check=KVEventsConfig.from_mapping,
    )
    max_num_batched_tokens: int | None = cli_field(
        None, "token budget of one step; default: 512 on a CPU, 8192 on a GPU", low=1
    )
    max_num_seqs: int = cli_field(
        None,
        "most sequences in one step; default: 256, or max_num_batched_tokens where that is less",
        low=1,
        high=65536,
    )
    async_scheduling: bool | None = cli_field(
        None,
        "plan the next step while one runs; default: on with a GPU unless there is a "
        "speculative_config, off on a CPU, where the model needs all cores",
    )
    kept_seats_fraction: float = cli_field(
        1 / 16,
        "fair policy: part of max_num_seqs that is kept free for tenants who have less than their "
        "share and were active in the last ten minutes, so that their requests start at once",
        low=0.0,
        high=0.5,
    )
    speculative_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        'JSON: guess the next tokens and check several in one step, for example {"method": '
        '"ngram"}; see docs/speculation.md',
        json=True,
        check=SpeculativeConfig.from_mapping,
    )
    max_waiting: int = cli_field(
        16384, "most requests that may wait; more are refused with HTTP 429", low=1
    )
    logits_processors: list[Any] | None = cli_field(  # noqa: RUF009
        None,
        "classes that change the logits of every step, as module:Class; see docs/extending.md",
    )
    enable_prompt_embeds: bool = cli_field(
        False, "accept embedding vectors: prompt_embeds, image_embeds, audio_embeds"
    )
    max_logprobs: int = cli_field(20, "most logprobs a request may ask for", low=0, high=1000)
    enable_chunked_prefill: bool = cli_field(
        True, "compute long prompts in pieces, over several steps"
    )
    prefill_tokens_beside_decodes: int | None = cli_field(
        None,
        "most prompt tokens in a step that also decodes other requests, so that their streams "
        "don't stutter; 0: no such limit; default: 0, but when serving on a CPU a limit that "
        "follows the load, see docs/scheduler.md",
        low=0,
    )
    long_prefill_token_threshold: int = cli_field(
        0, "most prompt tokens of one request in one step; 0: no such limit", low=0
    )
    scheduling_policy: str = cli_field(
        "fair",
        "order of the waiting queue; fair: shares between tenants, by their weights",
        choices=POLICIES,
    )
    prompt_overtaking: float = cli_field(
        4.0,
        "fair policy: a tenant's shorter prompts go ahead of a longer one that waits, until the "
        "engine has served this many tokens for each of the longer one's; 0: first come, first "
        "served",
        low=0.0,
    )
    device: str = cli_field(
        "auto",
        "where the model runs: auto, cpu, cuda, rocm, or one that a package brings",
    )
    additional_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        'JSON of settings that one device takes, under its name, such as {"tt": {"trace_mode": '
        '"none"}} (docs/tenstorrent.md); default: none',
        json=True,
        check=check_additional_config,
    )
    attention_backend: str | None = cli_field(
        None,
        "what computes attention, see docs/attention-backends.md; default: the first that fits",
    )
    enforce_eager: bool = cli_field(False, "no CUDA graphs on a GPU")
    cudagraph_mode: str | None = cli_field(
        None,
        "what is captured in CUDA graphs on a GPU; default: by the optimization level",
        choices=CUDAGRAPH_MODES,
    )
    cudagraph_capture_sizes: list[int] | None = cli_field(  # noqa: RUF009
        None,
        "numbers of tokens that CUDA graphs are captured for; default: by max_num_seqs; no more "
        "than fit the memory kept for graphs",
        low=1,
        high=8192,
    )
    optimization_level: int = cli_field(
        2,
        "how much start-up time to spend for speed on a GPU; it sets the default of "
        "cudagraph_mode: 0 NONE, 1 PIECEWISE, 2 and 3 FULL_AND_PIECEWISE. No level compiles the "
        "model by torch, and on a CPU it changes nothing",
        short="-O",
        low=0,
        high=3,
    )
    gpu_memory_utilization: float = cli_field(
        0.9, "part of a GPU's memory that weights, activations and KV cache may take", low=0.01,
        high=1.0,
    )  # fmt: skip
    enable_sleep_mode: bool = cli_field(
        False, "let operators put the model to sleep, which frees its memory until it is woken"
    )
    tensor_parallel_size: int = cli_field(
        1,
        "number of processes that share the model on CPUs, each with a part of its "
        "weights and of the KV cache; see docs/ranks.md",
        short="-tp",
        low=1,
        high=64,
    )
    decode_context_parallel_size: int = cli_field(
        1,
        "above 1: each rank of tensor_parallel_size has all heads' keys and values of some tokens, "
        "so that none has a copy; tensor_parallel_size is a multiple of it",
        short="-dcp",
        low=1,
        high=64,
    )
    enable_expert_parallel: bool = cli_field(
        False,
        "ranks of tensor_parallel_size, and a machine's replicas, have some experts each, "
        "instead of some columns of all",
        short="-ep",
    )
    enable_eplb: bool = cli_field(
        False, "move experts between the ranks of enable_expert_parallel by the tokens they get"
    )
    eplb_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON of enable_eplb: num_redundant_experts (copies in each layer, default: 0), "
        "step_interval (steps between moves, default: 3000), window_size (steps that are counted "
        "before, default: 1000)",
        json=True,
        check=EPLBConfig.from_mapping,
    )
    pipeline_parallel_size: int = cli_field(
        1,
        "number of stages, processes that have some of the model's layers each and "
        "work on several batches at once; see docs/ranks.md",
        short="-pp",
        low=1,
        high=64,
    )
    pipeline_layer_partition: str | None = cli_field(
        None, "number of layers of each stage, such as 6,5; default: as many each"
    )
    distributed_executor_backend: str | None = cli_field(
        None,
        "who starts the ranks that share the model: mp, the engine itself; ray, on machines of its "
        "cluster; external_launcher, such as torchrun, for programs that use `LLM`; uni: there is "
        "one; default: mp or uni",
        choices=EXECUTOR_BACKENDS,
    )
    data_parallel_size: int = cli_field(
        1,
        "number of engines with requests of their own that a launcher starts; with "
        "enable_expert_parallel they share the experts",
        short="-dp",
        low=1,
        high=64,
    )
    nnodes: int = cli_field(
        1, "number of machines whose ranks share the model, as many on each", low=1, high=64
    )
    node_rank: int = cli_field(
        0, "this machine among them; from 1 on with --headless", low=0, high=63
    )
    master_addr: str = cli_field(
        "127.0.0.1", "address of the machine with node_rank 0, which the others can reach"
    )
    master_port: int = cli_field(
        29501, "TCP port on which ranks of other machines find it", low=1, high=65535
    )
    num_threads: int | None = cli_field(
        None, "CPU threads of the engine, over all ranks; default: all cores", low=1, high=4096
    )
    cpu_threads_bind: str = cli_field(
        "auto",
        "CPUs to pin the engine's threads to, such as 0-3,8; auto: one core each, chosen by the "
        "engine; nobind: the system decides",
    )
    cpu_kernels: bool = cli_field(True, "use the compiled CPU kernels; off: plain torch")
    round_activations: bool = cli_field(
        True,
        "of bfloat16 models: multiply weights, keys and values with activations rounded to "
        "bfloat16, as such a model was trained, where the CPU has instructions for it; off: with "
        "float32",
    )
    rope_scaling: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None, "JSON that replaces the model's rope_scaling", json=True
    )
    rope_theta: float | None = cli_field(None, "replaces the model's rope_theta", low=1.0)
    generation_config: str = cli_field(
        "auto",
        "auto: sampling defaults of the model's generation_config.json; vllm: none",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        'JSON of sampling defaults, such as {"temperature": 0.6, "top_p": 0.95}; they go before '
        "those of the model's generation_config.json",
        json=True,
    )
    limit_mm_per_prompt: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        'JSON of the maximum numbers of images and videos in a prompt, such as {"image": 4}; '
        "default: 64 images, 8 videos, 16 audios",
        json=True,
    )
    mm_processor_kwargs: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        "JSON of options of the model's image processor, for requests that don't set them; for "
        'Whisper {"padding": "longest"}: 5 s of silence after each sound, in place of 30 s in all',
        json=True,
    )
    media_io_kwargs: dict[str, Any] | None = cli_field(  # noqa: RUF009
        None,
        'JSON of how videos are sampled by default, such as {"video": {"num_frames": 16}}',
        json=True,
    )
    video_pruning_rate: float = cli_field(
        0.0,
        "share of a video's tokens to drop: those that changed least since the frame before",
        low=0.0,
        high=0.99,
    )
    image_pruning_rate: float = cli_field(
        0.0,
        "share of an image's tokens to drop: those most like the ones left of them or above",
        low=0.0,
        high=0.99,
    )
    chat_template: str | None = cli_field(
        None, "file with the chat template, or its text; default: the model's"
    )
    tool_call_parser: str | None = cli_field(
        None, "how gateways read tool calls; default: told by the chat template"
    )
    reasoning_parser: str | None = cli_field(
        None, "how gateways find reasoning; none: not at all; default: told by the chat template"
    )
    io_processor_plugin: str | None = cli_field(
        None,
        "IO processor of an installed package, for a pooling model; see docs/extending.md; "
        "default: the io_processor_plugin of config.json",
    )
    otlp_traces_endpoint: str | None = cli_field(
        None,
        "where spans of requests are sent by OTLP: http://HOST:4318 or grpc://HOST:4317 (needs the "
        "extra otel); default: QUIRE_OTLP_TRACES_ENDPOINT, or nowhere",
    )
    collect_detailed_traces: str | None = cli_field(
        None,
        "model, worker or all, or some of them separated by commas: measure the seconds of each "
        "request in the model's forward pass and in the worker, as attributes of its span and as "
        "metrics; on a GPU this waits for each step; needs otlp_traces_endpoint",
    )
    disable_log_stats: bool = cli_field(False, "don't log statistics every few seconds")
    enable_log_requests: bool = cli_field(
        False,
        "log each request's id, lengths and adapter, and of tenants that store prompts its text",
    )

    def __post_init__(self) -> None:
        self._set_defaults()
        self.otlp_traces_endpoint = self.otlp_traces_endpoint or os.environ.get(VARIABLE) or None
        self.load_format = resolve_load_format(self.load_format, self.model_loader_extra_config)
        self.load_format, self.quantization = resolve_quantization(
            self.load_format, self.quantization
        )
        for spec in dataclasses.fields(self):
            setattr(self, spec.name, validate_field(spec, getattr(self, spec.name)))
        check_kv_scales(self)
        check_kv_tiers(self)
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if self.traced_modules and self.otlp_traces_endpoint is None:
            raise ConfigError(
                "collect_detailed_traces needs otlp_traces_endpoint.",
                param="collect_detailed_traces",
            )
        check_device(self.device)
        check_overrides(self.override_generation_config or {})
        if self.world_size > MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel_size * pipeline_parallel_size must be in [1, {MAX_RANKS}]; got "
                f"{self.world_size}.",
                param="pipeline_parallel_size",
            )
        if self.world_size > 1 and self.distributed_executor_backend == "uni":
            raise ConfigError(
                f"distributed_executor_backend=uni is for one rank; got {self.world_size}.",
                param="distributed_executor_backend",
            )
        if self.enable_eplb and not (self.enable_expert_parallel and self.tensor_parallel_size > 1):
            raise ConfigError(
                "enable_eplb needs enable_expert_parallel and a tensor_parallel_size above 1.",
                param="enable_eplb",
            )
        self._check_context_parallel()
        self._check_data_parallel()
        self._check_nodes()
        check_media_limits(self)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens is not None:
            limit = self.max_model_len
            if limit is not None and self.max_num_batched_tokens < limit:
                raise ConfigError(
                    f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                    f"max_model_len ({limit}) when chunked prefill is off.",
                    param="max_num_batched_tokens",
                )

    def _check_context_parallel(self) -> None:
        if not self.deals_tokens:
            return
        ranks, size = self.tensor_parallel_size, self.decode_context_parallel_size
        if ranks % size or ranks & (ranks - 1):
            raise ConfigError(
                f"tensor_parallel_size must be a power of two and a multiple of "
                f"decode_context_parallel_size ({size}); got {ranks}.",
                param="decode_context_parallel_size",
            )
        if self.calculate_kv_scales:
            raise ConfigError(
                "calculate_kv_scales can't be used with decode_context_parallel_size: each rank "
                "has some tokens. Use quantization_param_path.",
                param="calculate_kv_scales",
            )
        self.block_size = max(self.block_size, _TILE_TOKENS * ranks)

    def _check_data_parallel(self) -> None:
        if self.data_parallel_size == 1:
            return
        if self.distributed_executor_backend != "external_launcher":
            raise ConfigError(
                f"data_parallel_size must be 1; got {self.data_parallel_size}: an engine is one "
                "replica, but for distributed_executor_backend=external_launcher. For `quire "
                "serve` and `quire load_model` it is the same as --replicas.",
                param="data_parallel_size",
            )
        if self.shares_experts and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "data_parallel_size with enable_expert_parallel is for pipeline_parallel_size 1; "
                f"got {self.pipeline_parallel_size}.",
                param="data_parallel_size",
            )
        if self.shares_experts and self.enable_eplb:
            raise ConfigError(
                "enable_eplb can't be used with data_parallel_size: engines don't move experts.",
                param="enable_eplb",
            )

    def _check_nodes(self) -> None:
        if self.nnodes == 1:
            return
        if self.distributed_executor_backend not in (None, "mp"):
            raise ConfigError(
                f"nnodes is for distributed_executor_backend=mp; got "
                f"{self.distributed_executor_backend}.",
                param="nnodes",
            )
        if self.world_size % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size * pipeline_parallel_size must be a multiple of nnodes "
                f"({self.nnodes}); got {self.world_size}.",
                param="pipeline_parallel_size",
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank must be below nnodes ({self.nnodes}); got {self.node_rank}.",
                param="node_rank",
            )

    @property
    def deals_tokens(self) -> bool:
        """Whether each rank has some tokens of a KV block, instead of some heads of all."""
        return self.decode_context_parallel_size > 1

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks per machine."""
        return self.world_size // self.nnodes

    @property
    def world_size(self) -> int:
        """Number of ranks that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def needs_equal_requests(self) -> bool:
        """Whether a launcher's processes must get the same requests, because they share a model."""
        launched = self.distributed_executor_backend == "external_launcher"
        return launched and self.world_size > 1 and not self.shares_experts

    @property
    def shares_experts(self) -> bool:
        """Whether engines with requests of their own share the model's experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def eplb(self) -> EPLBConfig | None:
        """How experts are balanced; None: not at all. Raises `ConfigError`."""
        return EPLBConfig.from_mapping(self.eplb_config or {}) if self.enable_eplb else None

    @property
    def traced_modules(self) -> frozenset[str]:
        """The modules whose time is measured, of "model" and "worker". Raises `ConfigError`."""
        names = {name.strip() for name in (self.collect_detailed_traces or "").split(",")} - {""}
        if invalid := names - {"model", "worker", "all"}:
            raise ConfigError(
                "collect_detailed_traces must name model, worker or all; got "
                f"{', '.join(sorted(invalid))!r}.",
                param="collect_detailed_traces",
            )
        return frozenset({"model", "worker"} if "all" in names else names)

    @property
    def swaps(self) -> bool:
        """Whether the blocks of preempted sequences are saved."""
        return self.swap_space > 0 and self.preemption_mode != "recompute"

    def max_media(self, kind: str) -> int:
        """Return the maximum number of media of a kind, image, video or audio, in a prompt."""
        maximum = MAX_MEDIA_PER_PROMPT[kind]
        return min(int((self.limit_mm_per_prompt or {}).get(kind, maximum)), maximum)

    @property
    def pruning_rates(self) -> dict[str, float]:
        """Share of the vectors to drop by kind of media, where it isn't 0."""
        rates = {"image": self.image_pruning_rate, "video": self.video_pruning_rate}
        return {kind: rate for kind, rate in rates.items() if rate}

    def _set_defaults(self) -> None:
        """Limit the default of `max_num_seqs` to a small token budget; explicit values aren't
        changed.

        A `max_model_len` of -1 means the model's.
        """
        if self.max_model_len == -1:
            self.max_model_len = None
        max_num_seqs: Any = self.max_num_seqs
        if max_num_seqs is None:
            budget = self.max_num_batched_tokens
            small = type(budget) is int and 0 < budget < DEFAULT_NUM_SEQS
            self.max_num_seqs = budget if small and budget is not None else DEFAULT_NUM_SEQS

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from settings or JSON, by our names or vLLM's. Raises `ConfigError` for unknown
        ones.
        """
        return cls(**settings_from_variables() | translate_vllm_settings(values, SETTINGS))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Build from parsed flags; unset ones keep their defaults."""
        names = SETTINGS | {foreign.name for foreign in VLLM_FLAGS}
        values = {name: value for name, value in vars(args).items() if name in names}
        return cls.from_mapping(
            {name: value for name, value in values.items() if value is not None}
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, as `from_mapping` reads them."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if getattr(self, spec.name) != spec.default
        }

    @property
    def reserved_seats(self) -> int:
        """Sequences per step reserved for tenants below their share."""
        if self.scheduling_policy != "fair":
            return 0
        return int(self.kept_seats_fraction * self.max_num_seqs)

    def uses_async_scheduling(self, by_default: bool) -> bool:
        """Return `async_scheduling`, or the device's default; with drafts it is off by default.

        Pipeline stages work on steps of different sequences instead.
        """
        if self.pipeline_parallel_size > 1:
            return False
        if self.async_scheduling is None:
            return by_default and not self.speculative_config
        return self.async_scheduling

    @property
    def only_encodes(self) -> bool:
        """Whether only the model's encoder is needed, for other replicas."""
        kv_role = (self.kv_transfer_config or {}).get("kv_role")
        ec_role = (self.ec_transfer_config or {}).get("ec_role")
        return ec_role == EC_PRODUCER and kv_role != KV_PRODUCER

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model


#: Names of all settings.
SETTINGS = frozenset(spec.name for spec in dataclasses.fields(EngineConfig))


def add_cli_args(parser: argparse.ArgumentParser, *, skip: frozenset[str] = frozenset()) -> None:
    """Add a flag per setting, `--like-this`; booleans also take `--no-like-this`."""
    group = parser.add_argument_group("engine settings")
    group.add_argument(
        "--config", metavar="FILE", help="YAML file of settings; the command line wins"
    )
    for spec in dataclasses.fields(EngineConfig):
        if spec.name in skip:
            continue
        add_flag(group, spec)
    add_vllm_flags(parser, skip=skip | SETTINGS)


def add_vllm_flags(parser: argparse.ArgumentParser, *, skip: frozenset[str]) -> None:
    """Add vLLM's flags that aren't settings of ours, except those in `skip`."""
    group = parser.add_argument_group(
        "vLLM's settings",
        "accepted if they change nothing here, else refused with the reason: docs/arguments.md",
    )
    for foreign in VLLM_FLAGS:
        if foreign.name not in skip:
            add_vllm_flag(group, foreign)
