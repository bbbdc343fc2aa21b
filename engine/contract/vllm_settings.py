"""vLLM's engine settings that Quire has no setting for: what each means here. Torch-free.

Each is taken where it changes nothing here, becomes a setting of ours, or is refused by a sentence
that says what to do. A setting that `EngineConfig` has by the same name never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.errors import ConfigError

Kind = type[bool] | type[int] | type[float] | type[str] | type[dict] | type[list]


@dataclass(frozen=True)
class Foreign:
    """A setting of vLLM's.

    Attributes:
        name, kind, short: as in vLLM's command line.
        note: what it means here, for the table and for a refusal.
        takes: values that change nothing here; None: every value of its kind.
        becomes: settings of ours that a value stands for.
        choices: words that vLLM knows for it, where we take some of them.
    """

    name: str
    kind: Kind
    note: str
    takes: tuple[Any, ...] | None = ()
    becomes: Callable[[Any], dict[str, Any]] | None = None
    short: tuple[str, ...] = ()

    def resolve(self, value: Any) -> dict[str, Any]:
        """The settings of ours that this value stands for. Raises `ConfigError`."""
        if value is None:
            return {}
        if not self._fits(value):
            raise ConfigError(
                f"{self.name} must be {self.kind.__name__}, got {value!r}.", param=self.name
            )
        if self.becomes is not None:
            return self.becomes(value)
        if self.takes is None or any(_same(value, taken) for taken in self.takes):
            return {}
        raise ConfigError(f"{self.name}={value!r} can't be used: {self.note}", param=self.name)

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
        """ "becomes", "accepted", "refused", or "accepted as ..." where only some values are."""
        if self.becomes is not None:
            return "becomes ours"
        if self.takes is None:
            return "accepted, changes nothing"
        neutral = [taken for taken in self.takes if taken not in (None, False, "", {}, [])]
        if neutral:
            return f"accepted as {' or '.join(map(str, neutral))}"
        return "refused"


def _same(value: Any, taken: Any) -> bool:
    if isinstance(value, bool) or isinstance(taken, bool):
        return value is taken
    return bool(value == taken)


def _nothing(name: str, kind: Kind, note: str, **more: Any) -> Foreign:
    return Foreign(name, kind, note, takes=None, **more)


def _only(name: str, kind: Kind, takes: tuple[Any, ...], note: str, **more: Any) -> Foreign:
    return Foreign(name, kind, note, takes=takes, **more)


def _drafts(name: str, kind: Kind, key: str, *, usual: Any = None, **more: Any) -> Foreign:
    """One of the manual's flags that became a key of `speculative_config`. `usual`: its default,
    which asks for no drafts.
    """

    def becomes(value: Any) -> dict[str, Any]:
        return {"speculative_config": {key: value}} if value and value != usual else {}

    return Foreign(name, kind, f"`speculative_config`, `{key}`", becomes=becomes, **more)


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
_IN_SAMPLING = "give it with each request, in `SamplingParams`."
_NO_MEDIA = "models are served for text alone."
_NO_TRACES = "spans of single steps aren't recorded; each answer's flight record has its times."

#: All of them, in the order of vLLM's manual.
FOREIGN: tuple[Foreign, ...] = (
    _only(
        "tokenizer_mode",
        str,
        ("auto", "hf", "fast"),
        "fast tokenizers alone are used. Convert a slow one with transformers, and leave it out.",
    ),
    _only(
        "code_revision",
        str,
        (),
        "code comes with the model: give its commit as revision, or a folder as model.",
    ),
    _only(
        "tokenizer_revision",
        str,
        (),
        "the tokenizer comes with the model: give revision, or a folder as tokenizer.",
    ),
    _only(
        "config_format",
        str,
        ("auto", "hf"),
        "a model's config.json is read, or a GGUF file's header.",
    ),
    _only(
        "hf_config_path",
        str,
        (),
        "config.json is read from the model's folder; hf_overrides changes it.",
    ),
    _only("hf_token", bool, (False,), "set the variable HF_TOKEN for the engine's process."),
    _nothing(
        "guided_decoding_backend", str, "grammars are enforced by llguidance, whatever is named."
    ),
    _nothing(
        "structured_outputs_config", dict, "grammars are enforced by llguidance, whatever is named."
    ),
    _only("distributed_executor_backend", str, ("mp", "uni"), _NO_RAY),
    _only("worker_use_ray", bool, (False,), _NO_RAY),
    _only("engine_use_ray", bool, (False,), _NO_RAY),
    _only("ray_workers_use_nsight", bool, (False,), _NO_RAY),
    _only("pipeline_parallel_size", int, (1,), _ONE_DEVICE, short=("-pp",)),
    _only("tensor_parallel_size", int, (1,), _ONE_DEVICE, short=("-tp",)),
    _only("data_parallel_size", int, (1,), _ONE_DEVICE, short=("-dp",)),
    _only("decode_context_parallel_size", int, (1,), _ONE_DEVICE, short=("-dcp",)),
    _only("enable_expert_parallel", bool, (False,), _ONE_DEVICE, short=("-ep",)),
    _nothing("max_parallel_loading_workers", int, "one process loads the model, part by part."),
    _nothing("disable_custom_all_reduce", bool, "one device has nothing to reduce."),
    _nothing("use_v2_block_manager", bool, "there is one block manager."),
    _nothing("num_lookahead_slots", int, "blocks for drafts are taken as they are needed."),
    _nothing(
        "swap_space",
        float,
        "preempted sequences are computed again, so no host memory is set aside.",
    ),
    _only(
        "cpu_offload_gb",
        float,
        (0,),
        "weights stay on their device. Use --quantization for less memory.",
    ),
    _only(
        "preemption_mode", str, ("recompute",), "preempted sequences are computed again: recompute."
    ),
    _only(
        "quantization_param_path",
        str,
        (),
        "scales of an fp8 KV cache come from the checkpoint, or from calculate_kv_scales.",
    ),
    _nothing(
        "max_context_len_to_capture",
        int,
        "CUDA graphs are captured for numbers of tokens, of any context.",
    ),
    _nothing(
        "max_seq_len_to_capture",
        int,
        "CUDA graphs are captured for numbers of tokens, of any context.",
    ),
    _nothing("tokenizer_pool_size", int, "gateways tokenise, in threads of their own."),
    _nothing("tokenizer_pool_type", str, "gateways tokenise, in threads of their own."),
    _nothing("tokenizer_pool_extra_config", dict, "gateways tokenise, in threads of their own."),
    _nothing(
        "lora_extra_vocab_size",
        int,
        "an adapter with tokens that the model hasn't is refused by name, whatever is set aside.",
    ),
    _nothing(
        "long_lora_scaling_factors",
        list,
        "each adapter is run by its own configuration, and rotary embeddings are the model's.",
    ),
    _nothing("fully_sharded_loras", bool, "one device has nothing to share out."),
    _only("qlora_adapter_name_or_path", str, (), _ON_REQUEST),
    _only(
        "scheduler_delay_factor",
        float,
        (0,),
        "prompts start as soon as there is room. Leave it out.",
    ),
    _drafts("speculative_model", str, "model"),
    _drafts("num_speculative_tokens", int, "num_speculative_tokens"),
    _drafts("speculative_model_quantization", str, "quantization"),
    _drafts(
        "speculative_draft_tensor_parallel_size",
        int,
        "draft_tensor_parallel_size",
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
    _only("ignore_patterns", list, ([],), "only the files that a model needs are downloaded."),
    _nothing(
        "use_tqdm_on_load", bool, "progress is told as the status of the model, not as a bar."
    ),
    _only("collect_detailed_traces", str, (), _NO_TRACES),
    _nothing("kv_cache_metrics", bool, "figures of the KV cache are always counted."),
    _nothing("kv_cache_metrics_sample", float, "figures of the KV cache are always counted."),
    _nothing("disable_log_requests", bool, "prompts are never logged."),
    _only("enable_log_requests", bool, (False,), "prompts are never logged."),
    _nothing("max_log_len", int, "prompts are never logged."),
    _only(
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
    _only("override_generation_config", dict, ({},), _IN_SAMPLING),
    _only("logits_processors", list, ([],), _IN_SAMPLING),
    _only(
        "logprobs_mode",
        str,
        ("raw_logprobs",),
        "log probabilities are the model's own: raw_logprobs.",
    ),
    _nothing("limit_mm_per_prompt", dict, _NO_MEDIA),
    _nothing("mm_processor_kwargs", dict, _NO_MEDIA),
    _nothing("mm_processor_cache_gb", float, _NO_MEDIA),
    _nothing("skip_mm_profiling", bool, _NO_MEDIA),
    _nothing("allowed_local_media_path", str, _NO_MEDIA),
    _nothing("disable_async_output_proc", bool, "see async_scheduling."),
    _nothing("disable_cascade_attn", bool, "there is no cascade attention."),
    _only("num_scheduler_steps", int, (1,), "a step makes one token a sequence; leave it out."),
    _nothing("multi_step_stream_outputs", bool, "each token is sent as it comes."),
    _only("kv_transfer_config", dict, ({},), "KV blocks stay with their replica. Leave it out."),
    _only(
        "kv_events_config", dict, ({},), "events of single blocks aren't published. Leave it out."
    ),
    _only("kv_offloading_size", float, (0,), "KV blocks stay on their device. Leave it out."),
    _only(
        "worker_cls",
        str,
        ("auto",),
        "the device names its worker; see the entry points quire.devices.",
    ),
    _only("worker_extension_cls", str, ("",), "use `LLM.apply_model`."),
    _only("additional_config", dict, ({},), "devices take no settings of their own."),
)
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
    for given, value in values.items():
        name = str(given).replace("-", "_")
        if name in known:
            ours[name] = value
        elif name in BY_NAME:
            for key, each in BY_NAME[name].resolve(value).items():
                several = isinstance(each, dict) and isinstance(derived.get(key), dict)
                derived[key] = {**derived[key], **each} if several else each
        else:
            raise ConfigError(f"{given} is no engine setting.", param=str(given))
    for name, value in derived.items():
        if ours.get(name) is not None and ours[name] != value:
            raise ConfigError(
                f"{name} is given twice, as {ours[name]!r} and {value!r}.", param=name
            )
    return {**ours, **derived}
