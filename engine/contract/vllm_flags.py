"""vLLM's engine settings that have no setting of the same name in Quire. Torch-free.

Each is accepted without effect, translated to a setting of ours, or refused with a message that
says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.contract.errors import ConfigError

Kind = type[bool] | type[int] | type[float] | type[str] | type[dict] | type[list]


@dataclass(frozen=True)
class VllmFlag:
    """A setting of vLLM.

    Attributes:
        name, kind, short: as in vLLM's command line.
        reason: its meaning in Quire, for the table and for error messages.
        takes: accepted values without effect; None: every value of its kind.
        becomes: settings of ours that a value is translated to.
    """

    name: str
    kind: Kind
    reason: str
    takes: tuple[Any, ...] | None = ()
    becomes: Callable[[Any], dict[str, Any]] | None = None
    short: tuple[str, ...] = ()

    def resolve(self, value: Any) -> dict[str, Any]:
        """The settings of ours that this value is translated to. Raises `ConfigError`."""
        if value is None:
            return {}
        if not self._fits(value):
            raise ConfigError(
                f"{self.name} must be {self.kind.__name__}, got {value!r}.", param=self.name
            )
        if self.becomes is not None:
            return self.becomes(value)
        if self.takes is None or any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in self.takes
        ):
            return {}
        raise ConfigError(f"{self.name}={value!r} can't be used: {self.reason}", param=self.name)

    def _fits(self, value: Any) -> bool:
        if self.kind is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if self.kind is dict:
            return isinstance(value, Mapping)
        if self.kind is list:
            return isinstance(value, Sequence) and not isinstance(value, str)
        return isinstance(value, self.kind)

    @property
    def outcome(self) -> str:
        """ "becomes", "accepted", "refused", or "accepted as ..." if only some values are
        accepted.
        """
        if self.becomes is not None:
            return "becomes ours"
        if self.takes is None:
            return "accepted, changes nothing"
        neutral = [value for value in self.takes if value not in (None, False, "", {}, [])]
        if neutral:
            return f"accepted as {' or '.join(map(str, neutral))}"
        return "refused"


def ignored(names: str, kind: Kind, reason: str, **more: Any) -> list[VllmFlag]:
    """Return flags that are accepted without effect, by names separated by spaces."""
    return restricted(names, kind, None, reason, **more)


def restricted(
    names: str, kind: Kind, takes: tuple[Any, ...] | None, reason: str, **more: Any
) -> list[VllmFlag]:
    """Return flags that accept some values without effect and refuse others."""
    return [VllmFlag(name, kind, reason, takes=takes, **more) for name in names.split()]


_OURS = "speculative_config"


def _drafts(name: str, kind: Kind, key: str, *, usual: Any = None, **more: Any) -> VllmFlag:
    """One of the manual's flags that became a key of `speculative_config`. `usual`: its default,
    which doesn't enable drafts.
    """

    def becomes(value: Any) -> dict[str, Any]:
        return {_OURS: {key: value}} if value and value != usual else {}

    return VllmFlag(name, kind, f"`{_OURS}`, `{key}`", becomes=becomes, **more)


#: In the order of vLLM's manual.
_DRAFTS_OF_THE_MANUAL: tuple[VllmFlag, ...] = (
    _drafts("speculative_model", str, "model"),
    _drafts("num_speculative_tokens", int, "num_speculative_tokens"),
    _drafts("speculative_model_quantization", str, "quantization"),
    _drafts(
        "speculative_draft_tensor_parallel_size",
        int,
        "draft_tensor_parallel_size",
        usual=1,
        short=("-spec-draft-tp",),
    ),
    _drafts("speculative_max_model_len", int, "max_model_len"),
    _drafts("speculative_disable_by_batch_size", int, "disable_by_batch_size"),
    _drafts("ngram_prompt_lookup_max", int, "prompt_lookup_max"),
    _drafts("ngram_prompt_lookup_min", int, "prompt_lookup_min"),
    _drafts("spec_decoding_acceptance_method", str, "acceptance_method", usual="rejection_sampler"),
    _drafts(
        "typical_acceptance_sampler_posterior_threshold", float, "posterior_threshold", usual=0.09
    ),
    _drafts("typical_acceptance_sampler_posterior_alpha", float, "posterior_alpha", usual=0.3),
)


def check_draft_source(derived: Mapping[str, Any], original_names: Mapping[str, str]) -> None:
    """Raise `ConfigError` if such settings don't name a source of drafts.

    `derived`: settings of ours that vLLM's became; `first_given`: the first flag behind each.
    """
    original_name = original_names.get(_OURS)
    if original_name is not None and not {"model", "method"} & derived[_OURS].keys():
        raise ConfigError(
            f"{original_name} needs speculative_model, which says where drafts come from.",
            param=original_name,
        )


_NO_MEDIA = "media are prepared as the model's files say, and cached by content."
_MEDIA_CACHE = "gateways cache what they prepare: set QUIRE_MEDIA_CACHE_BYTES. LLM caches none."
_ONE_HOST = "ranks share tensors and layers, nothing else. For more throughput run more replicas."
_REPLICAS = (
    "ranks of data parallelism are replicas, and gateways that share Redis balance over all of "
    "them. `quire serve` starts as many as data_parallel_size_local says, one with "
    "data_parallel_rank or data_parallel_external_lb, else data_parallel_size."
)
_OTHER_HOSTS = "ranks exchange tensors by shared memory, and by TCP between machines."
_EXPERTS = "ranks have experts in their order, until enable_eplb moves them."
_BACKENDS = "what computes a layer is chosen by what fits. There is attention_backend."
_STATES = (
    "inputs of convolutions are kept in float32, and states in blocks of their own pool. There is "
    "mamba_ssm_cache_dtype."
)
_MEASURED = "single steps and kernels aren't measured all the time: POST /start_profile does."
_OFFLOAD = "weights stay on their device. Use quantization for less memory."
_SCHEDULER = "there is one scheduler; see scheduling_policy."
_REMOVED = "removed in vLLM 0.5.1: the checkpoint's processor says it."
_READING = "weights are mapped from their files, in threads of their own."


def _as(name: str, kind: Kind, ours: str, **more: Any) -> VllmFlag:
    return VllmFlag(name, kind, f"`{ours}`", becomes=lambda value: {ours: value}, **more)


NEWER: tuple[VllmFlag, ...] = (
    _as("device_memory_utilization", float, "gpu_memory_utilization"),
    _as("max_num_queued_reqs", int, "max_waiting"),
    _as("max_num_scheduled_tokens", int, "max_num_batched_tokens"),
    _drafts("spec_method", str, "method"),
    _drafts("spec_model", str, "model"),
    _drafts("spec_tokens", int, "num_speculative_tokens"),
    # Images, audio, video.
    *ignored(
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm "
        "mm_processor_cache_type mm_processor_device mm_tensor_ipc video_pruning_method",
        str,
        _NO_MEDIA,
    ),
    *ignored(
        "mm_encoder_fp8_scale_save_margin mm_ipc_gpu_memory_gb mm_shm_cache_max_object_size_mb",
        float,
        _NO_MEDIA,
    ),
    *ignored(
        "language_model_only disable_chunked_mm_input interleave_mm_strings "
        "mm_device_do_normalize enable_tower_connector_lora",
        bool,
        _NO_MEDIA,
    ),
    *ignored("default_mm_loras", dict, _NO_MEDIA),
    *restricted("disable_mm_preprocessor_cache", bool, (False,), _MEDIA_CACHE),
    *restricted(
        "allowed_media_domains",
        list,
        ([],),
        "QUIRE_ALLOWED_MEDIA_DOMAINS for gateways; `LLM` has it.",
    ),
    *restricted(
        "mm_encoder_only", bool, (False,), "ec_transfer_config's ec_producer has no decoder."
    ),
    VllmFlag(
        "enable_mm_embeds",
        bool,
        "`enable_prompt_embeds`",
        becomes=lambda value: {"enable_prompt_embeds": True} if value else {},
    ),
    # Several devices.
    *restricted("prefill_context_parallel_size", int, (1,), _ONE_HOST),
    *ignored(
        "data_parallel_size_local data_parallel_rank data_parallel_start_rank "
        "data_parallel_rpc_port",
        int,
        _REPLICAS,
    ),
    *ignored(
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb",
        bool,
        _REPLICAS,
    ),
    *ignored("data_parallel_address data_parallel_backend", str, _REPLICAS),
    *restricted("enable_dbo enable_elastic_ep enable_fault_tolerance", bool, (False,), _ONE_HOST),
    *restricted("expert_placement_strategy", str, ("linear",), _EXPERTS),
    *ignored("enable_ep_weight_filter", bool, "a rank reads its own experts alone."),
    *restricted(
        "device_ids", list, ([],), "CUDA_VISIBLE_DEVICES says which device an engine takes."
    ),
    *ignored("all2all_backend dcp_comm_backend", str, _OTHER_HOSTS),
    *ignored(
        "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size",
        int,
        "a rank has a block's part of 128 tokens, or a multiple.",
    ),
    *ignored(
        "dbo_decode_token_threshold dbo_prefill_token_threshold distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds elastic_ep_max_dp_size ubatch_size",
        int,
        _OTHER_HOSTS,
    ),
    *ignored(
        "disable_nccl_for_dp_synchronization enable_batch_sharded_sampling", bool, _OTHER_HOSTS
    ),
    *ignored("fault_tolerance_config", dict, _OTHER_HOSTS),
    # Computation.
    *restricted(
        "gdn_prefill_backend kda_decode_backend kda_prefill_backend linear_backend mamba_backend "
        "moe_backend sparse_indexer_topk_backend",
        str,
        ("auto",),
        _BACKENDS,
    ),
    *restricted("ir_op_priority kernel_config", dict, ({},), _BACKENDS),
    *ignored("enable_flashinfer_autotune use_fp64_gumbel", bool, _BACKENDS),
    *restricted("mamba_cache_dtype", str, ("auto", "float32"), _STATES),
    *restricted("mamba_cache_mode", str, ("none",), _STATES),
    *ignored("mamba_block_size", int, _STATES),
    *restricted("max_cudagraph_capture_size", int, (), "name them all: cudagraph_capture_sizes."),
    *restricted("performance_mode", str, ("balanced",), "see optimization_level."),
    # Memory.
    *restricted(
        "offload_group_size offload_num_in_group offload_prefetch_step", float, (0,), _OFFLOAD
    ),
    *restricted("offload_backend", str, ("auto", "native"), _OFFLOAD),
    *restricted("cpu_offload_params offload_params", list, ([],), _OFFLOAD),
    *restricted("kv_cache_dtype_skip_layers", list, ([],), "kv_cache_dtype is of all layers."),
    *ignored("sleep_mode_backend", str, "memory sleeps by enable_sleep_mode alone."),
    # Loading.
    *ignored("safetensors_load_strategy", str, _READING),
    *ignored("safetensors_prefetch_block_size safetensors_prefetch_num_threads", int, _READING),
    *restricted("pt_load_map_location", str, ("cpu",), "files are read on the CPU, part by part."),
    *restricted(
        "quantization_config", dict, ({},), "config.json tells how a checkpoint is quantized."
    ),
    *restricted("model_class_overrides", dict, ({},), "give a class to `ModelRegistry`."),
    *restricted(
        "allow_deprecated_quantization", bool, (False,), "see docs/quantization.md for what is."
    ),
    # Steps.
    *restricted("max_num_active_seqs", int, (), "max_num_seqs says how many may run."),
    *restricted("max_num_queued_tokens", int, (), "max_waiting says how many requests may wait."),
    *restricted("prefill_schedule_interval", int, (1,), "see prefill_tokens_beside_decodes."),
    *restricted(
        "long_prefill_token_threshold_adaptive", bool, (False,), "name a number of tokens."
    ),
    *ignored("scheduler_reserve_full_isl", bool, "blocks are taken as they are needed."),
    *restricted("scheduler_cls", str, ("",), _SCHEDULER),
    *restricted("stream_interval", int, (1,), "each token is sent as it comes."),
    *restricted(
        "shutdown_timeout", float, (), "QUIRE_DRAIN_SECONDS says how long requests may go on."
    ),
    *ignored("renderer_num_workers", int, "gateways tokenize, in threads of their own."),
    *restricted("numa_bind", bool, (False,), "cpu_threads_bind says where threads run."),
    *restricted("kv_sharing_fast_prefill", bool, (False,), "each layer computes all of a prompt."),
    *restricted(
        "reasoning_config", dict, ({},), "how reasoning ends is the reasoning parser's to say."
    ),
    *restricted("reasoning_parser_plugin", str, ("",), "a package brings one; docs/extending.md."),
    # Metrics.
    *ignored("show_hidden_metrics_for_version", str, "all figures are always shown."),
    *ignored("aggregate_engine_logging", bool, "each replica logs a line of its own."),
    *restricted(
        "cudagraph_metrics enable_layerwise_nvtx_tracing enable_logging_iteration_details "
        "enable_mfu_metrics enable_trace_replay per_request_spec_decode_metrics",
        bool,
        (False,),
        _MEASURED,
    ),
    *restricted(
        "profiler_config", dict, ({},), "give start_profile a folder, or POST /start_profile."
    ),
    *restricted(
        "custom_histogram_buckets", dict, ({},), "buckets are those of vLLM's own metrics."
    ),
    # Adapters.
    *restricted(
        "lora_target_modules", list, ([],), "an adapter's own configuration names its modules."
    ),
    *ignored(
        "enable_mixed_moe_lora_format enable_moe_shared_loras specialize_active_lora",
        bool,
        "adapters of all kinds may stand beside each other.",
    ),
    *ignored("max_lora_cls_labels", int, "an adapter's head may have any number of labels."),
    # External weights and caches.
    *restricted(
        "ec_manager_config weight_transfer_config",
        dict,
        ({},),
        "weights and KV blocks stay where they are.",
    ),
    *restricted("enable_return_routed_experts", bool, (False,), "no experts are told of."),
)


#: By field of attention_config: the accepted value, and why others are refused.
_ATTENTION: dict[str, tuple[Any, str]] = {
    "flash_attn_version": (3, "the backend FLASH_ATTN is FlashAttention 3."),
    "use_trtllm_attention": (False, "the backend FLASHINFER runs FlashInfer's own kernels."),
}


def _attention_config(value: Any) -> dict[str, Any]:
    for key, field in value.items():
        neutral, reason = _ATTENTION.get(
            key, (None, "a backend chooses its own details; there is attention_config.backend.")
        )
        if key != "backend" and field is not None and field != neutral:
            raise ConfigError(
                f"attention_config.{key}={field!r} can't be used: {reason}",
                param="attention_config",
            )
    return {"attention_backend": str(value["backend"])} if value.get("backend") else {}


_NOT_COMPILED = {
    "splitting_ops": (
        "graphs are split at attention alone; cudagraph_mode says which batches have whole ones."
    ),
    "debug_dump_path": (
        "models aren't compiled by torch, so there is no code to write; start_profile writes "
        "what a step runs."
    ),
}


def _compilation_config(value: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, field in value.items():
        if key in ("level", "mode") and isinstance(field, int) and not isinstance(field, bool):
            settings["optimization_level"] = field
        elif key in ("cudagraph_mode", "cudagraph_capture_sizes"):
            settings[key] = field.name if isinstance(field, Enum) else field
        elif field is not None:
            reason = _NOT_COMPILED.get(
                key,
                "models aren't compiled by torch; there are mode, cudagraph_mode and "
                "cudagraph_capture_sizes.",
            )
            raise ConfigError(
                f"compilation_config.{key} can't be used: {reason}", param="compilation_config"
            )
    return settings


_TASKS = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
    "encode": {"runner": "pooling"},
}


def _task(value: Any) -> dict[str, Any]:
    if value not in _TASKS:
        raise ConfigError(f"task must be one of {', '.join(_TASKS)}; got {value!r}.", param="task")
    return dict(_TASKS[value])


#: In the order of vLLM's manual.
_OF_THE_MANUAL: tuple[VllmFlag, ...] = (
    *restricted(
        "tokenizer_mode",
        str,
        ("auto", "hf", "fast", "slow", "mistral"),
        "a folder's own files say which tokenizer it is, and each kind gives the same ids.",
    ),
    *restricted(
        "code_revision",
        str,
        (),
        "code comes with the model: give its commit as revision, or a folder as model.",
    ),
    *restricted(
        "config_format",
        str,
        ("auto", "hf"),
        "a model's config.json is read, or a GGUF file's header.",
    ),
    *restricted(
        "hf_config_path",
        str,
        (),
        "config.json is read from the model's folder; hf_overrides changes it.",
    ),
    *restricted("hf_token", bool, (False,), "set the variable HF_TOKEN for the engine's process."),
    *ignored(
        "guided_decoding_backend", str, "grammars are enforced by llguidance, whatever is named."
    ),
    *ignored(
        "structured_outputs_config", dict, "grammars are enforced by llguidance, whatever is named."
    ),
    VllmFlag(
        "worker_use_ray",
        bool,
        "`distributed_executor_backend`, `ray`",
        becomes=lambda value: {"distributed_executor_backend": "ray"} if value else {},
    ),
    *restricted(
        "engine_use_ray", bool, (False,), "an engine is a process. Run `LLM` in an actor of yours."
    ),
    *restricted(
        "ray_workers_use_nsight", bool, (False,), "ranks run on CPUs, which Nsight doesn't measure."
    ),
    *ignored("max_parallel_loading_workers", int, "each rank loads its part of the model."),
    *ignored(
        "disable_custom_all_reduce", bool, "ranks gather through shared memory, and reduce nothing."
    ),
    *ignored("image_feature_size", int, _REMOVED),
    *ignored("image_input_shape image_input_type", str, _REMOVED),
    *ignored("image_token_id", int, _REMOVED),
    *ignored("use_v2_block_manager", bool, "there is one block manager."),
    *ignored("num_lookahead_slots", int, "blocks for drafts are taken as they are needed."),
    *restricted(
        "cpu_offload_gb",
        float,
        (0,),
        "weights stay on their device. Use --quantization for less memory.",
    ),
    *ignored(
        "max_context_len_to_capture",
        int,
        "CUDA graphs are captured for numbers of tokens, of any context.",
    ),
    *ignored(
        "max_seq_len_to_capture",
        int,
        "CUDA graphs are captured for numbers of tokens, of any context.",
    ),
    *ignored("tokenizer_pool_size", int, "gateways tokenize, in threads of their own."),
    *ignored("tokenizer_pool_type", str, "gateways tokenize, in threads of their own."),
    *ignored("tokenizer_pool_extra_config", dict, "gateways tokenize, in threads of their own."),
    *ignored(
        "lora_extra_vocab_size",
        int,
        "an adapter's own tokens have their room beside it, whatever is set aside.",
    ),
    *restricted(
        "long_lora_scaling_factors",
        list,
        ([], [1], [1.0]),
        "rotary embeddings are the model's for all adapters. For LongLoRA set rope_scaling.",
    ),
    *ignored("fully_sharded_loras", bool, "each rank has all of A, which takes no gather."),
    *ignored(
        "qlora_adapter_name_or_path",
        str,
        "all layers are rounded, and the adapter comes with each request: `lora_request`.",
    ),
    *restricted(
        "scheduler_delay_factor",
        float,
        (0,),
        "prompts start as soon as there is room. Leave it out.",
    ),
    *_DRAFTS_OF_THE_MANUAL,
    *restricted(
        "ignore_patterns", list, ([],), "only the files that a model needs are downloaded."
    ),
    *ignored(
        "use_tqdm_on_load", bool, "progress is told as the status of the model, not as a bar."
    ),
    *ignored("kv_cache_metrics", bool, "figures of the KV cache are always counted."),
    *ignored("kv_cache_metrics_sample", float, "figures of the KV cache are always counted."),
    *ignored("disable_log_requests", bool, "`enable_log_requests` is off by default."),
    *ignored("max_log_len", int, "`enable_log_requests` logs 512 tokens of a text at most."),
    *restricted(
        "prefix_caching_hash_algo",
        str,
        ("sha256", "sha256_cbor", "builtin"),
        "blocks are hashed with sha256 alone: with a weaker hash tenants could meet in one.",
    ),
    VllmFlag("task", str, "`runner` and `convert`", becomes=_task),
    VllmFlag(
        "attention_config", dict, "`attention_backend`", becomes=_attention_config, short=("-ac",)
    ),
    VllmFlag(
        "compilation_config",
        dict,
        "`optimization_level`, `cudagraph_mode`, `cudagraph_capture_sizes`",
        becomes=_compilation_config,
        short=("-cc",),
    ),
    VllmFlag(
        "kv_cache_memory_bytes",
        int,
        "`cpu_kvcache_space`",
        becomes=lambda value: {"cpu_kvcache_space": value / 2**30},
    ),
    VllmFlag(
        "override_pooler_config",
        dict,
        "`pooler_config`",
        becomes=lambda value: {"pooler_config": dict(value)},
    ),
    *restricted(
        "logprobs_mode",
        str,
        ("raw_logprobs",),
        "log probabilities are the model's own: raw_logprobs.",
    ),
    *restricted("mm_processor_cache_gb", float, (4,), _MEDIA_CACHE),  # vLLM's default
    *ignored("skip_mm_profiling", bool, _NO_MEDIA),
    *restricted(
        "allowed_local_media_path",
        str,
        ("",),
        "QUIRE_ALLOWED_LOCAL_MEDIA_PATH for gateways; `LLM` has it.",
    ),
    *ignored("disable_async_output_proc", bool, "see async_scheduling."),
    *ignored("disable_cascade_attn", bool, "there is no cascade attention."),
    *restricted(
        "num_scheduler_steps", int, (1,), "a step makes one token a sequence; leave it out."
    ),
    *ignored("multi_step_stream_outputs", bool, "each token is sent as it comes."),
    *restricted(
        "worker_cls",
        str,
        ("auto",),
        "the device names its worker; see the entry points quire.devices.",
    ),
    *restricted("worker_extension_cls", str, ("",), "use `LLM.apply_model`."),
)
VLLM_FLAGS: tuple[VllmFlag, ...] = (*_OF_THE_MANUAL, *NEWER)
BY_NAME: Mapping[str, VllmFlag] = {setting.name: setting for setting in VLLM_FLAGS}


def translate_vllm_settings(
    values: Mapping[str, Any], quire_names: frozenset[str]
) -> dict[str, Any]:
    """Translate settings by vLLM's names to ours.

    Args:
        known: names of our settings; these are left unchanged.

    Raises:
        ConfigError: for an unknown name (with `param`), or an unsupported value.
    """
    ours: dict[str, Any] = {}
    derived: dict[str, Any] = {}
    #: By setting of ours, the first of vLLM's that was translated to it.
    original_names: dict[str, str] = {}
    for original_name, value in values.items():
        name = str(original_name).replace("-", "_")
        if name in quire_names:
            ours[name] = _first(value) if name == "served_model_name" else value
        elif name in BY_NAME:
            for key, setting in BY_NAME[name].resolve(value).items():
                original_names.setdefault(key, name)
                several = isinstance(setting, dict) and isinstance(derived.get(key), dict)
                derived[key] = {**derived[key], **setting} if several else setting
        else:
            raise ConfigError(f"{original_name} is no engine setting.", param=str(original_name))
    check_draft_source(derived, original_names)
    for name, value in derived.items():
        if ours.get(name) is not None and ours[name] != value:
            raise ConfigError(
                f"{name} is given twice, as {ours[name]!r} and {value!r}.", param=name
            )
    return {**ours, **derived}


def _first(names: Any) -> Any:
    """Return the first of several model names, which outputs and metrics use."""
    return names[0] if isinstance(names, list | tuple) and names else names
