"""The form of a model, with the engine's options as fields derived from `EngineConfig`.

Only the grouping of the fields is defined here. An empty field means the engine's default; values
are validated by the engine's own rules, and an error is shown at the field that it names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.http import QueryDict

from catalog import actions
from catalog.checkpoint import default_name
from catalog.cli import NAMED
from catalog.engine_settings import validate_engine_settings
from catalog.models import ServedModel
from engine.contract.checkpoint_options import SAMPLING_DEFAULTS
from engine.contract.command_line import base_type, validate_field
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, InvalidRequest, QuireError
from engine.contract.speculative_config import SpeculativeConfig
from engine.text.chat_template import read_template
from tenants.models import Tenant, User

PREFIX = "s."
MAX_PAIRS = 100
#: (heading, names of the group's fields), in the order of the page.
GROUPS: tuple[tuple[str, str], ...] = (
    (
        "Memory and context",
        "max_model_len quantization dtype kv_cache_dtype mamba_ssm_cache_dtype cpu_kvcache_space "
        "gpu_memory_utilization num_gpu_blocks_override block_size enable_prefix_caching "
        "calculate_kv_scales quantization_param_path disable_sliding_window "
        "disable_hybrid_kv_cache_manager kv_offloading_size kv_offloading_backend "
        "kv_transfer_config ec_transfer_config swap_space preemption_mode kv_events_config",
    ),
    (
        "Steps and fairness",
        "max_num_seqs max_num_batched_tokens max_waiting scheduling_policy kept_seats_fraction "
        "prompt_overtaking enable_chunked_prefill prefill_tokens_beside_decodes "
        "long_prefill_token_threshold async_scheduling speculative_config",
    ),
    (
        "Answers",
        "chat_template tool_call_parser reasoning_parser generation_config "
        "override_generation_config max_logprobs seed "
        "logits_processors enable_prompt_embeds limit_mm_per_prompt "
        "mm_processor_kwargs media_io_kwargs video_pruning_rate "
        "image_pruning_rate",
    ),
    ("Adapters", "enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype"),
    (
        "Where the weights come from",
        "revision download_dir load_format model_loader_extra_config tokenizer "
        "tokenizer_revision skip_tokenizer_init model_impl hf_overrides rope_scaling rope_theta "
        "trust_remote_code",
    ),
    ("Vectors, labels and scores", "runner convert pooler_config io_processor_plugin"),
    (
        "Device and kernels",
        "device additional_config tensor_parallel_size decode_context_parallel_size "
        "data_parallel_size enable_expert_parallel enable_eplb eplb_config "
        "pipeline_parallel_size pipeline_layer_partition distributed_executor_backend nnodes "
        "node_rank master_addr master_port num_threads cpu_threads_bind cpu_kernels "
        "round_activations attention_backend batch_invariant enforce_eager optimization_level "
        "cudagraph_mode cudagraph_capture_sizes",
    ),
    (
        "Operation",
        "enable_sleep_mode otlp_traces_endpoint collect_detailed_traces disable_log_stats "
        "enable_log_requests",
    ),
)
#: Known keys of a mapping, offered as completions.
KEYS = {
    "override_generation_config": SAMPLING_DEFAULTS,
    "speculative_config": tuple(spec.name for spec in dataclasses.fields(SpeculativeConfig)),
    "pooler_config": ("pooling_type", "use_activation", "dimensions"),
    "rope_scaling": ("rope_type", "factor", "original_max_position_embeddings"),
    "model_loader_extra_config": ("pattern", "tensorizer_uri"),
}
_SPECS = {spec.name: spec for spec in dataclasses.fields(EngineConfig) if spec.name not in NAMED}


@dataclass
class EngineOptionField:
    """An engine setting's form field.

    Attributes:
        kind: "switch", "choice", "number", "text", "numbers", "names" or "pairs".
        default: for display. value: as shown in the form, "" for the default. pairs: items of a
            mapping.
        error: message of an invalid value.
    """

    name: str
    kind: str
    help: str
    default: str
    bounds: str = ""
    low: float | int | None = None
    high: float | int | None = None
    is_integer: bool = False
    choices: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    value: str = ""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""

    @property
    def flag(self) -> str:
        """The setting's command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """The setting's name for display."""
        return self.name.replace("_", " ")

    @property
    def is_set(self) -> bool:
        """Whether it's set to something other than the default."""
        return bool(self.value or any(key for key, _ in self.pairs))


@dataclass
class Group:
    """Fields under one heading."""

    title: str
    options: list[EngineOptionField]

    @property
    def num_set(self) -> int:
        """Number of settings that differ from the default."""
        return sum(option.is_set for option in self.options)

    @property
    def has_errors(self) -> bool:
        return any(option.error for option in self.options)


class SettingsForm:
    """All options with the values of `settings` or of a submitted form."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.options = {name: _option(spec) for name, spec in _SPECS.items()}
        #: An error that names no field.
        self.error = ""
        for name, value in (settings or {}).items():
            if option := self.options.get(name):
                _set_initial(option, value)

    @property
    def groups(self) -> list[Group]:
        """Groups in the page's order; settings without a group come last."""
        remaining = dict(self.options)
        groups = [
            Group(title, [remaining.pop(name) for name in names.split()]) for title, names in GROUPS
        ]
        return [*groups, Group("More", list(remaining.values()))] if remaining else groups

    @property
    def has_errors(self) -> bool:
        """Whether there is any error."""
        return bool(self.error) or any(option.error for option in self.options.values())

    def read(self, sent: QueryDict) -> dict[str, Any]:
        """Return the submitted settings; errors are stored at their fields, see `has_errors`."""
        values: dict[str, Any] = {}
        for name, option in self.options.items():
            try:
                value = _read(option, sent)
                if value is not None:
                    values[name] = validate_field(_SPECS[name], value)
            except (ConfigError, ValueError) as error:
                option.error = error.message if isinstance(error, ConfigError) else str(error)
        if not self.has_errors:
            self._check_together(values)
        return values

    def _check_together(self, values: dict[str, Any]) -> None:
        """Check rules that involve several fields."""
        try:
            validate_engine_settings(values)
            if template := values.get("chat_template"):
                values["chat_template"] = read_template(template)
        except QuireError as error:
            option = self.options.get(error.param or "")
            if option is None:
                self.error = error.message
            else:
                option.error = error.message


def _option(spec: dataclasses.Field[Any]) -> EngineOptionField:
    meta, kind = spec.metadata, base_type(str(spec.type))
    low, high = meta.get("low"), meta.get("high")
    bounds = ""
    if kind in (int, float) and low is not None:
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
    listed = "names" if low is None else "numbers"
    kinds = {bool: "switch", dict: "pairs", list: listed, int: "number", float: "number"}
    numbers = bool(meta.get("choices")) and kind is int
    return EngineOptionField(
        name=spec.name,
        kind="choice" if meta.get("choices") else kinds.get(kind, "text"),
        help=meta["help"].removeprefix("JSON: ") if kind is dict else meta["help"],
        default=_default(spec),
        bounds="" if numbers else bounds,
        low=low,
        high=high,
        is_integer=kind is int,
        choices=tuple(str(choice) for choice in meta.get("choices") or ()),
        keys=KEYS.get(spec.name, ()),
    )


def _default(spec: dataclasses.Field[Any]) -> str:
    if spec.default is None or spec.default == "":
        return ""
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    return f"{spec.default:g}" if isinstance(spec.default, float) else str(spec.default)


def _set_initial(option: EngineOptionField, value: Any) -> None:
    """Put a value from the catalogue into its field."""
    if value is None:
        return
    if isinstance(value, bool):
        option.value = "on" if value else "off"
    elif isinstance(value, dict):
        option.pairs = list(_flatten(value))
    elif isinstance(value, list):
        option.value = ", ".join(map(str, value))
    else:
        option.value = str(value)


def _read(option: EngineOptionField, sent: QueryDict) -> Any:
    """Parse a field's value, None for the default. Raises ValueError for another kind of value."""
    name = PREFIX + option.name
    if option.kind == "pairs":
        keys, values = sent.getlist(f"{name}.key"), sent.getlist(f"{name}.value")
        option.pairs = [
            (key.strip(), value.strip())
            for key, value in zip(keys, values, strict=False)
            if key.strip() or value.strip()
        ][:MAX_PAIRS]
        return _unflatten(option.pairs) or None
    option.value = text = sent.get(name, "").strip()
    if not text:
        return None
    if option.kind == "switch":
        if text not in ("on", "off"):
            raise ValueError("Choose on, off or default.")
        return text == "on"
    if option.kind == "numbers":
        return [_number(word, is_integer=True) for word in text.replace(",", " ").split()]
    if option.kind == "names":
        return text.replace(",", " ").split()
    if option.kind == "number" or (option.kind == "choice" and option.is_integer):
        return _number(text, is_integer=option.is_integer)
    return text


def _number(text: str, *, is_integer: bool) -> int | float:
    try:
        return int(text) if is_integer else float(text)
    except ValueError:
        kind = "a whole number" if is_integer else "a number"
        raise ValueError(f"It must be {kind}, got {text[:50]!r}.") from None


def _unflatten(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Turn `a.b` and a value into {"a": {"b": value}}. Raises ValueError for conflicting names."""
    nested: dict[str, Any] = {}
    for key, text in pairs:
        if not key:
            raise ValueError(f"The value {text[:50]!r} has no name.")
        *path, last = key.split(".")
        where = nested
        for name in path:
            where = where.setdefault(name, {})
            if not isinstance(where, dict):
                raise ValueError(f"{key} is given twice.")
        if last in where:
            raise ValueError(f"{key} is given twice.")
        where[last] = _value(text)
    return nested


def _value(text: str) -> Any:
    """Parse a JSON number, true, false, null or list; any other text stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            is_text = isinstance(value, str) and _value(value) == value
            pairs.append((prefix + key, value if is_text else json.dumps(value)))
    return pairs


#: (field, label, help, maximum) of integers.
NUMBERS = (
    ("num_replicas", "Replicas", "On each node that runs it, 1 to 64.", 64),
    ("num_spares", "Spares", "Loaded and waiting, to take over when no other replica serves.", 64),
    (
        "num_prefill",
        "Prefill replicas",
        "Of the replicas, those that only compute prompts for the others, by a shared KV tier.",
        63,
    ),
    (
        "num_encode",
        "Encode replicas",
        "Of the replicas, those that only encode pictures and sound for the others, likewise.",
        63,
    ),
    (
        "idle_minutes",
        "Unload after minutes without requests",
        "The next request loads it again. 0: never.",
        43_200,
    ),
)
LISTS = ("aliases", "fallbacks")
MAX_NAMES = 50


class ServedModelForm:
    """The form's state. `errors`: field -> message; `values`: field -> text or list of texts."""

    def __init__(self, values: dict[str, Any], settings: SettingsForm) -> None:
        self.values, self.settings = values, settings
        self.errors: dict[str, str] = {}
        self.engine_settings: dict[str, Any] = {}
        self.general = ""

    @classmethod
    def of(cls, model: ServedModel | None) -> ServedModelForm:
        """Return the form of a model in the catalogue, or of a new one with the defaults."""
        row = model or ServedModel()
        values: dict[str, Any] = {
            "name": row.name,
            "source": row.source,
            "node": row.node,
            "public": row.public,
            "managed": row.managed,
            "tenants": [tenant.pk for tenant in row.tenants.all()] if model else [],
            **{name: str(getattr(row, name)) for name, *_ in NUMBERS},
            **{name: list(getattr(row, name)) for name in LISTS},
        }
        form = cls(values, SettingsForm(row.settings))
        form.engine_settings = dict(row.settings)
        return form

    @classmethod
    def from_post(cls, data: QueryDict, model: ServedModel | None) -> ServedModelForm:
        """Return the form of a POST, validated as far as possible without the catalogue."""
        values: dict[str, Any] = {
            "name": model.name if model else data.get("name", "").strip(),
            "source": data.get("source", "").strip(),
            "node": data.get("node", "").strip(),
            "public": "public" in data,
            "managed": "managed" in data,
            "tenants": [int(pk) for pk in data.getlist("tenants") if pk.isdigit()][:MAX_NAMES],
            **{name: data.get(name, "").strip() for name, *_ in NUMBERS},
            "aliases": data.get("aliases", "").replace(",", " ").split(),
            "fallbacks": [name for name in data.getlist("fallbacks") if name],
        }
        form = cls(values, SettingsForm())
        form.engine_settings = form.settings.read(data)
        form._check()
        return form

    @property
    def has_errors(self) -> bool:
        """Whether there is any error."""
        return bool(self.errors or self.general) or self.settings.has_errors

    @property
    def advanced_errors(self) -> bool:
        """Whether a field under "Advanced" has an error."""
        return self.settings.has_errors or not self.errors.keys() <= {"source", "name"}

    @property
    def numbers(self) -> list[dict[str, str]]:
        """The fields of `NUMBERS`, for the template."""
        return [
            {
                "name": name,
                "label": label,
                "help": text,
                "value": self.values[name],
                "error": self.errors.get(name, ""),
                "most": str(high),
            }
            for name, label, text, high in NUMBERS
        ]

    @property
    def all_tenants(self) -> list[dict[str, Any]]:
        """Tenants that a model can be shared with."""
        chosen = set(self.values["tenants"])
        tenants = Tenant.objects.filter(active=True).order_by("name")[:500]
        return [
            {"pk": tenant.pk, "name": tenant.name, "chosen": tenant.pk in chosen}
            for tenant in tenants
        ]

    @property
    def other_models(self) -> list[dict[str, Any]]:
        """Models that can serve as fallbacks: the chosen ones in order, then the others."""
        chosen: list[str] = self.values["fallbacks"]
        names = ServedModel.objects.exclude(name=self.values["name"]).values_list("name", flat=True)
        other_names = [name for name in names[:500] if name not in chosen]
        return [{"name": name, "chosen": name in chosen} for name in [*chosen, *other_names]]

    def _check(self) -> None:
        for name, label, _, high in NUMBERS:
            text = self.values[name]
            if not (text.isascii() and text.isdigit() and int(text[:9]) <= high):
                self.errors[name] = f"{label} must be a whole number up to {high}."
        if not self.values["source"]:
            self.errors["source"] = "Enter a folder, a GGUF file or a model on the hub."
        elif not self.values["name"]:
            self.values["name"] = default_name(self.values["source"])

    @transaction.atomic
    def save(self, user: User, model: ServedModel | None) -> ServedModel:
        """Load a new model or change an existing one. Raises the errors of the actions."""
        columns: dict[str, Any] = {
            "source": self.values["source"],
            "settings": self.engine_settings,
            "node": self.values["node"],
            "managed": self.values["managed"],
            **{name: int(self.values[name]) for name, *_ in NUMBERS},
            **{name: self.values[name] for name in LISTS},
        }
        if model is None:
            if ServedModel.objects.filter(name=self.values["name"]).exists():
                raise InvalidRequest("A model with this name exists already.", param="name")
            saved = actions.load_model(actor=user, name=self.values["name"], **columns)
        else:
            saved = actions.update_model(actor=user, model=model, **columns)
        tenants = list(Tenant.objects.filter(pk__in=self.values["tenants"]))
        public = self.values["public"]
        previous_tenants = {tenant.pk for tenant in saved.tenants.all()}
        if saved.public != public or previous_tenants != {tenant.pk for tenant in tenants}:
            saved = actions.share_model(actor=user, model=saved, tenants=tenants, public=public)
        return saved

    def add_error(self, error: QuireError) -> None:
        """Store an error at the field that it names."""
        param = error.param or ""
        if param in self.values:
            self.errors[param] = error.message
        elif option := self.settings.options.get(param):
            option.error = error.message
        else:
            self.general = error.message
