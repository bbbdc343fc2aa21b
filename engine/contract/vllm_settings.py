"""vLLM's engine settings that Quire has no setting for: what each means here. Torch-free.

Each is taken where it changes nothing here, becomes a setting of ours, or is refused by a sentence
that says what to do. A setting that `EngineConfig` has by the same name never comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.contract.errors import ConfigError
from engine.contract.foreign import Foreign, nothing, only
from engine.contract.vllm_newer_settings import NEWER
from engine.contract.vllm_speculative_settings import OF_THE_MANUAL, check_source


def _attention_config(value: Any) -> dict[str, Any]:
    for key in value:
        if key != "backend":
            raise ConfigError(
                f"attention_config.{key} can't be used: a backend chooses its own details; "
                "there is attention_config.backend.",
                param="attention_config",
            )
    return {"attention_backend": value["backend"]} if value.get("backend") else {}


_COMPILED = {
    "cudagraph_mode": "cudagraph_mode",
    "cudagraph_capture_sizes": "cudagraph_capture_sizes",
}


def _compilation_config(value: Any) -> dict[str, Any]:
    found = {}
    for key, each in value.items():
        if key in ("level", "mode") and isinstance(each, int) and not isinstance(each, bool):
            found["optimization_level"] = each
        elif key in _COMPILED:
            found[_COMPILED[key]] = each
        else:
            raise ConfigError(
                f"compilation_config.{key} can't be used: models aren't compiled by torch; there "
                "are mode, cudagraph_mode and cudagraph_capture_sizes.",
                param="compilation_config",
            )
    return found


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


def _kv_bytes(value: Any) -> dict[str, Any]:
    return {"cpu_kvcache_space": value / 2**30}


_ONE_DEVICE = (
    "an engine runs on one device. For more throughput run more replicas "
    "(`manage.py load_model --replicas N`); for a model that doesn't fit, --quantization."
)
_ON_REQUEST = "an adapter comes with each request: `lora_request`, or its name as the model's."
_NO_RAY = "there is no Ray here. Replicas on other hosts are started there with `manage.py engine`."
_NO_MEDIA = "models are served for text alone."
_NO_TRACES = "spans of single steps aren't recorded; each answer's flight record has its times."

#: In the order of vLLM's manual.
_OF_THE_MANUAL: tuple[Foreign, ...] = (
    only(
        "tokenizer_mode",
        str,
        ("auto", "hf", "fast"),
        "fast tokenizers alone are used. Convert a slow one with transformers, and leave it out.",
    ),
    only(
        "code_revision",
        str,
        (),
        "code comes with the model: give its commit as revision, or a folder as model.",
    ),
    only(
        "tokenizer_revision",
        str,
        (),
        "the tokenizer comes with the model: give revision, or a folder as tokenizer.",
    ),
    only(
        "config_format",
        str,
        ("auto", "hf"),
        "a model's config.json is read, or a GGUF file's header.",
    ),
    only(
        "hf_config_path",
        str,
        (),
        "config.json is read from the model's folder; hf_overrides changes it.",
    ),
    only("hf_token", bool, (False,), "set the variable HF_TOKEN for the engine's process."),
    nothing(
        "guided_decoding_backend", str, "grammars are enforced by llguidance, whatever is named."
    ),
    nothing(
        "structured_outputs_config", dict, "grammars are enforced by llguidance, whatever is named."
    ),
    only("distributed_executor_backend", str, ("mp", "uni"), _NO_RAY),
    only("worker_use_ray", bool, (False,), _NO_RAY),
    only("engine_use_ray", bool, (False,), _NO_RAY),
    only("ray_workers_use_nsight", bool, (False,), _NO_RAY),
    only("pipeline_parallel_size", int, (1,), _ONE_DEVICE, short=("-pp",)),
    only("tensor_parallel_size", int, (1,), _ONE_DEVICE, short=("-tp",)),
    only("data_parallel_size", int, (1,), _ONE_DEVICE, short=("-dp",)),
    only("decode_context_parallel_size", int, (1,), _ONE_DEVICE, short=("-dcp",)),
    only("enable_expert_parallel", bool, (False,), _ONE_DEVICE, short=("-ep",)),
    nothing("max_parallel_loading_workers", int, "one process loads the model, part by part."),
    nothing("disable_custom_all_reduce", bool, "one device has nothing to reduce."),
    nothing("use_v2_block_manager", bool, "there is one block manager."),
    nothing("num_lookahead_slots", int, "blocks for drafts are taken as they are needed."),
    nothing(
        "swap_space",
        float,
        "preempted sequences are computed again, so no host memory is set aside.",
    ),
    only(
        "cpu_offload_gb",
        float,
        (0,),
        "weights stay on their device. Use --quantization for less memory.",
    ),
    only(
        "preemption_mode", str, ("recompute",), "preempted sequences are computed again: recompute."
    ),
    nothing(
        "max_context_len_to_capture",
        int,
        "CUDA graphs are captured for numbers of tokens, of any context.",
    ),
    nothing(
        "max_seq_len_to_capture",
        int,
        "CUDA graphs are captured for numbers of tokens, of any context.",
    ),
    nothing("tokenizer_pool_size", int, "gateways tokenise, in threads of their own."),
    nothing("tokenizer_pool_type", str, "gateways tokenise, in threads of their own."),
    nothing("tokenizer_pool_extra_config", dict, "gateways tokenise, in threads of their own."),
    nothing(
        "lora_extra_vocab_size",
        int,
        "an adapter's own tokens have their room beside it, whatever is set aside.",
    ),
    nothing(
        "long_lora_scaling_factors",
        list,
        "each adapter is run by its own configuration, and rotary embeddings are the model's.",
    ),
    nothing("fully_sharded_loras", bool, "one device has nothing to share out."),
    only("qlora_adapter_name_or_path", str, (), _ON_REQUEST),
    only(
        "scheduler_delay_factor",
        float,
        (0,),
        "prompts start as soon as there is room. Leave it out.",
    ),
    *OF_THE_MANUAL,
    only("ignore_patterns", list, ([],), "only the files that a model needs are downloaded."),
    nothing("use_tqdm_on_load", bool, "progress is told as the status of the model, not as a bar."),
    only("collect_detailed_traces", str, (), _NO_TRACES),
    nothing("kv_cache_metrics", bool, "figures of the KV cache are always counted."),
    nothing("kv_cache_metrics_sample", float, "figures of the KV cache are always counted."),
    nothing("disable_log_requests", bool, "prompts are never logged."),
    only("enable_log_requests", bool, (False,), "prompts are never logged."),
    nothing("max_log_len", int, "prompts are never logged."),
    only(
        "prefix_caching_hash_algo",
        str,
        ("sha256", "sha256_cbor", "builtin"),
        "blocks are hashed with sha256 alone: with a weaker hash tenants could meet in one.",
    ),
    Foreign("task", str, "`runner` and `convert`", becomes=_task),
    Foreign(
        "attention_config", dict, "`attention_backend`", becomes=_attention_config, short=("-ac",)
    ),
    Foreign(
        "compilation_config",
        dict,
        "`optimization_level`, `cudagraph_mode`, `cudagraph_capture_sizes`",
        becomes=_compilation_config,
        short=("-cc",),
    ),
    Foreign("kv_cache_memory_bytes", int, "`cpu_kvcache_space`", becomes=_kv_bytes),
    Foreign(
        "override_pooler_config",
        dict,
        "`pooler_config`",
        becomes=lambda value: {"pooler_config": dict(value)},
    ),
    only(
        "logprobs_mode",
        str,
        ("raw_logprobs",),
        "log probabilities are the model's own: raw_logprobs.",
    ),
    nothing("limit_mm_per_prompt", dict, _NO_MEDIA),
    nothing("mm_processor_kwargs", dict, _NO_MEDIA),
    nothing("mm_processor_cache_gb", float, _NO_MEDIA),
    nothing("skip_mm_profiling", bool, _NO_MEDIA),
    nothing("allowed_local_media_path", str, _NO_MEDIA),
    nothing("disable_async_output_proc", bool, "see async_scheduling."),
    nothing("disable_cascade_attn", bool, "there is no cascade attention."),
    only("num_scheduler_steps", int, (1,), "a step makes one token a sequence; leave it out."),
    nothing("multi_step_stream_outputs", bool, "each token is sent as it comes."),
    only("kv_transfer_config", dict, ({},), "KV blocks stay with their replica. Leave it out."),
    only(
        "kv_events_config", dict, ({},), "events of single blocks aren't published. Leave it out."
    ),
    only("kv_offloading_size", float, (0,), "KV blocks stay on their device. Leave it out."),
    only(
        "worker_cls",
        str,
        ("auto",),
        "the device names its worker; see the entry points quire.devices.",
    ),
    only("worker_extension_cls", str, ("",), "use `LLM.apply_model`."),
    only("additional_config", dict, ({},), "devices take no settings of their own."),
)
FOREIGN: tuple[Foreign, ...] = (*_OF_THE_MANUAL, *NEWER)
BY_NAME: Mapping[str, Foreign] = {setting.name: setting for setting in FOREIGN}


def translated(values: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Settings by vLLM's names, as ours alone.

    Args:
        known: names of our settings; these are left as they are.

    Raises:
        ConfigError: of an unknown name (with `param`), or one that can't be used.
    """
    ours: dict[str, Any] = {}
    derived: dict[str, Any] = {}
    #: By setting of ours, the first of vLLM's that became it.
    first_given: dict[str, str] = {}
    for given, value in values.items():
        name = str(given).replace("-", "_")
        if name in known:
            ours[name] = _first(value) if name == "served_model_name" else value
        elif name in BY_NAME:
            for key, each in BY_NAME[name].resolve(value).items():
                first_given.setdefault(key, name)
                several = isinstance(each, dict) and isinstance(derived.get(key), dict)
                derived[key] = {**derived[key], **each} if several else each
        else:
            raise ConfigError(f"{given} is no engine setting.", param=str(given))
    check_source(derived, first_given)
    for name, value in derived.items():
        if ours.get(name) is not None and ours[name] != value:
            raise ConfigError(
                f"{name} is given twice, as {ours[name]!r} and {value!r}.", param=name
            )
    return {**ours, **derived}


def _first(names: Any) -> Any:
    """Of several names of a model the first: what outputs and figures are told under."""
    return names[0] if isinstance(names, list | tuple) and names else names
