"""Settings that later releases of vLLM (to 0.33) have beside the manual's. See `vllm_settings`."""

from __future__ import annotations

from typing import Any

from engine.contract.foreign import Foreign, Kind, nothing, only, several
from engine.contract.vllm_speculative_settings import OF_LATER_RELEASES

_NO_MEDIA = "models are served for text alone."
_ONE_DEVICE = "an engine runs on one device. For more throughput run more replicas."
_OTHERS = "it is about several devices, and an engine runs on one."
_BACKENDS = "what computes a layer is chosen by what fits. There is attention_backend."
_STATES = "states of such layers are kept in float32, a row of them for each sequence."
_MEASURED = "single steps and kernels aren't measured all the time: POST /start_profile does."
_OFFLOAD = "weights and KV blocks stay on their device. Use quantization for less memory."
_SCHEDULER = "there is one scheduler; see scheduling_policy."
_READING = "weights are mapped from their files, in threads of their own."


def _of(kind: Kind, note: str, names: str) -> tuple[Foreign, ...]:
    """Taken, whatever is said."""
    return several(lambda name: nothing(name, kind, note), names)


def _but(kind: Kind, takes: tuple[Any, ...], note: str, names: str) -> tuple[Foreign, ...]:
    """Taken for these values."""
    return several(lambda name: only(name, kind, takes, note), names)


def _as(name: str, kind: Kind, ours: str, **more: Any) -> Foreign:
    """Another name of a setting of ours."""
    return Foreign(name, kind, f"`{ours}`", becomes=lambda value: {ours: value}, **more)


NEWER: tuple[Foreign, ...] = (
    _as("device_memory_utilization", float, "gpu_memory_utilization"),
    _as("max_num_queued_reqs", int, "max_waiting"),
    _as("max_num_scheduled_tokens", int, "max_num_batched_tokens"),
    *OF_LATER_RELEASES,
    # Images, audio, video.
    *_of(
        str,
        _NO_MEDIA,
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm "
        "mm_processor_cache_type mm_processor_device mm_tensor_ipc video_pruning_method",
    ),
    *_of(
        float,
        _NO_MEDIA,
        "mm_encoder_fp8_scale_save_margin mm_ipc_gpu_memory_gb mm_shm_cache_max_object_size_mb "
        "video_pruning_rate",
    ),
    *_of(
        bool,
        _NO_MEDIA,
        "language_model_only disable_chunked_mm_input interleave_mm_strings "
        "mm_device_do_normalize enable_tower_connector_lora",
    ),
    *_of(dict, _NO_MEDIA, "media_io_kwargs default_mm_loras"),
    *_of(list, _NO_MEDIA, "allowed_media_domains"),
    *_but(bool, (False,), _NO_MEDIA, "mm_encoder_only enable_mm_embeds"),
    # Several devices.
    *_but(int, (1,), _ONE_DEVICE, "prefill_context_parallel_size nnodes data_parallel_size_local"),
    *_but(int, (0,), _ONE_DEVICE, "node_rank data_parallel_rank data_parallel_start_rank"),
    *_but(
        bool,
        (False,),
        _ONE_DEVICE,
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
        "enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_fault_tolerance",
    ),
    *_but(list, ([],), "CUDA_VISIBLE_DEVICES says which device an engine takes.", "device_ids"),
    *_of(
        str,
        _OTHERS,
        "all2all_backend data_parallel_address data_parallel_backend dcp_comm_backend "
        "expert_placement_strategy master_addr",
    ),
    *_of(
        int,
        _OTHERS,
        "cp_kv_cache_interleave_size data_parallel_rpc_port dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dcp_kv_cache_interleave_size distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds elastic_ep_max_dp_size master_port ubatch_size",
    ),
    *_of(bool, _OTHERS, "disable_nccl_for_dp_synchronization enable_batch_sharded_sampling"),
    *_of(dict, _OTHERS, "eplb_config fault_tolerance_config"),
    # What computes.
    *_but(
        str,
        ("auto",),
        _BACKENDS,
        "gdn_prefill_backend kda_decode_backend kda_prefill_backend linear_backend mamba_backend "
        "moe_backend sparse_indexer_topk_backend",
    ),
    *_but(dict, ({},), _BACKENDS, "ir_op_priority kernel_config"),
    *_of(bool, _BACKENDS, "enable_flashinfer_autotune use_fp64_gumbel"),
    *_but(str, ("auto", "float32"), _STATES, "mamba_cache_dtype mamba_ssm_cache_dtype"),
    *_but(str, ("none",), _STATES, "mamba_cache_mode"),
    *_of(int, _STATES, "mamba_block_size"),
    only("max_cudagraph_capture_size", int, (), "name them all: cudagraph_capture_sizes."),
    only("performance_mode", str, ("balanced",), "see optimization_level."),
    # Memory.
    *_but(float, (0,), _OFFLOAD, "offload_group_size offload_num_in_group offload_prefetch_step"),
    *_but(str, ("auto", "native"), _OFFLOAD, "kv_offloading_backend offload_backend"),
    *_but(list, ([],), _OFFLOAD, "cpu_offload_params offload_params"),
    *_but(list, ([],), "kv_cache_dtype is of all layers.", "kv_cache_dtype_skip_layers"),
    *_of(str, "memory sleeps by enable_sleep_mode alone.", "sleep_mode_backend"),
    # Reading.
    *_of(str, _READING, "safetensors_load_strategy"),
    *_of(int, _READING, "safetensors_prefetch_block_size safetensors_prefetch_num_threads"),
    only("pt_load_map_location", str, ("cpu",), "files are read on the CPU, part by part."),
    only("quantization_config", dict, ({},), "config.json tells how a checkpoint is quantised."),
    only("model_class_overrides", dict, ({},), "give a class to `ModelRegistry`."),
    only("allow_deprecated_quantization", bool, (False,), "see docs/quantization.md for what is."),
    # Steps.
    only("max_num_active_seqs", int, (), "max_num_seqs says how many may run."),
    only("max_num_queued_tokens", int, (), "max_waiting says how many requests may wait."),
    only("prefill_schedule_interval", int, (1,), "see prefill_tokens_beside_decodes."),
    only("long_prefill_token_threshold_adaptive", bool, (False,), "name a number of tokens."),
    nothing("scheduler_reserve_full_isl", bool, "blocks are taken as they are needed."),
    only("scheduler_cls", str, ("",), _SCHEDULER),
    only("stream_interval", int, (1,), "each token is sent as it comes."),
    only("shutdown_timeout", float, (), "QUIRE_DRAIN_SECONDS says how long requests may go on."),
    nothing("renderer_num_workers", int, "gateways tokenise, in threads of their own."),
    only("numa_bind", bool, (False,), "cpu_threads_bind says where threads run."),
    only("kv_sharing_fast_prefill", bool, (False,), "each layer computes all of a prompt."),
    only("reasoning_config", dict, ({},), "how reasoning ends is the reasoning parser's to say."),
    only("reasoning_parser_plugin", str, ("",), "a package brings one; docs/extending/plugins.md."),
    # Figures.
    *_of(str, "all figures are always shown.", "show_hidden_metrics_for_version"),
    *_of(bool, "each replica logs a line of its own.", "aggregate_engine_logging"),
    *_but(
        bool,
        (False,),
        _MEASURED,
        "cudagraph_metrics enable_layerwise_nvtx_tracing enable_logging_iteration_details "
        "enable_mfu_metrics enable_trace_replay per_request_spec_decode_metrics",
    ),
    only("profiler_config", dict, ({},), "give start_profile a folder, or POST /start_profile."),
    only("custom_histogram_buckets", dict, ({},), "buckets are those of vLLM's own metrics."),
    # Adapters.
    only("lora_target_modules", list, ([],), "an adapter's own configuration names its modules."),
    *_of(
        bool,
        "adapters of all kinds may stand beside each other.",
        "enable_mixed_moe_lora_format enable_moe_shared_loras specialize_active_lora",
    ),
    *_of(int, "an adapter's head may have any number of labels.", "max_lora_cls_labels"),
    # Weights and caches from elsewhere.
    *_but(
        dict,
        ({},),
        "weights and KV blocks stay where they are.",
        "ec_manager_config ec_transfer_config weight_transfer_config",
    ),
    only("enable_return_routed_experts", bool, (False,), "no experts are told of."),
)
