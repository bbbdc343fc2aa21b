"""Fields of all generating requests, and the handling of unsupported and unknown fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from django.conf import settings
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from engine.contract.engine_config import MAX_MEDIA_PER_PROMPT
from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.validation import INT_LIMIT
from inference.errors import UnsupportedField


def _fail_fast_schema(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(map(_fail_fast_schema, schema))
    if not isinstance(schema, dict):
        return schema
    copy = {name: _fail_fast_schema(value) for name, value in schema.items() if name != "metadata"}
    if "metadata" in schema:
        copy["metadata"] = schema["metadata"]
    if schema.get("type") in ("list", "dict"):
        copy["fail_fast"] = True
    return copy


class FailFastModel(BaseModel):
    """A model whose lists and dicts, nested ones too, report only their first invalid element.

    Pydantic reports all of them, which takes two seconds for a list of 400,000.
    """

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return cast("CoreSchema", _fail_fast_schema(handler(source)))


class StrictModel(BaseModel):
    """A model without conversions between types and without unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


MAX_METADATA = 16
_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 14 * 86_400

BatchMetadata = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=MAX_METADATA),
]


def _seconds(window: str) -> int:
    """Return the seconds of a window; 0 if it is invalid."""
    match = _WINDOW.fullmatch(window)
    return int(match[1]) * _UNIT_S[match[2]] if match else 0


class OutputExpiresAfter(StrictModel):
    """When output and error file are removed."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchRequest(StrictModel):
    """A batch to run. `completion_window`: minutes, hours or days, such as "24h"; 14 d at most."""

    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    endpoint: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    ]
    completion_window: str
    metadata: BatchMetadata | None = None
    output_expires_after: OutputExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def _window(cls, window: str) -> str:
        if not 0 < _seconds(window) <= MAX_WINDOW_S:
            raise ValueError("must be a duration such as '24h' (units m, h, d; at most '14d').")
        return window

    @property
    def window_s(self) -> int:
        """The completion window in seconds."""
        return _seconds(self.completion_window)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

#: Fields that Quire knows but doesn't support -> values that mean the default. Any other value is
#: rejected with an error that names the field.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    # vLLM's
    "logits_processors": ([],),
    # SDKs merge it into the body before they send it.
    "extra_body": (),
}


#: Hints that Quire ignores -> values that ask for nothing. The response lists those that were
#: ignored.
IGNORED_HINTS: dict[str, tuple[Any, ...]] = {
    "context_management": ([], {}),
    "max_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "safety_identifier": (),
    "verbosity": ("medium",),
}


def _label(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError("must not hold control characters.")
    return text


#: A client's label: one line of limited length.
ShortText = Annotated[str, Field(max_length=512), AfterValidator(_label)]


#: May be omitted or "": see `catalog.access.access_model`.
ModelName = Annotated[str, Field(max_length=256)]


#: Up to 16 labels that the response repeats.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
#: Requests with smaller values run earlier.
Priority = Annotated[int, Field(ge=-INT_LIMIT, le=INT_LIMIT)]
Tier = Literal["auto", "default", "flex", "priority"]
#: Priorities of service tiers; a key's limits decide how early its requests may run.
FLEX_PRIORITY, PRIORITY_PRIORITY = 10, -1


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name in self.model_extra or {}:
            raise ValueError(f"'{name}' isn't a stream option.")
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported.")
        return self


class RemoteAddress(StrictModel):
    """Where a replica serves what others load; None: in the tier that both share. Only replicas of
    the model are asked.
    """

    remote_host: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None

    @property
    def address(self) -> str:
        """tcp://HOST:PORT; "": in a tier."""
        if self.remote_host is None or self.remote_port is None:
            return ""
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        return f"tcp://{host}:{self.remote_port}"


class KVTransferParams(RemoteAddress):
    """Where a prompt's KV blocks come from. Clients name no blocks: replicas find them by their
    hashes.

    Attributes:
        do_remote_decode: another replica goes on with the prompt; the answer has the
            `kv_transfer_params` of that one's request.
        do_remote_prefill: another replica has just computed the prompt.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: None = None
    remote_request_id: None = None
    remote_block_ids: None = None


class ECTransferParams(RemoteAddress):
    """Where a replica has what its encoder made of a picture or of sound.

    Attributes:
        num_encoder_tokens: number of vectors.
    """

    num_encoder_tokens: Annotated[int, Field(ge=0)] | None = None


#: Media that a prompt may have.
_MAX_EC_TRANSFERS = sum(MAX_MEDIA_PER_PROMPT.values())


def _check_num_transfers(values: Any) -> Any:
    """Check the number of entries before pydantic validates each."""
    if isinstance(values, dict) and len(values) > _MAX_EC_TRANSFERS:
        raise ValueError(f"may hold at most {_MAX_EC_TRANSFERS} entries, got {len(values)}.")
    return values


def _check_one_address(values: dict[str, ECTransferParams]) -> dict[str, ECTransferParams]:
    if len(addresses := {params.address for params in values.values()}) > 1:
        raise ValueError(f"must name one replica; got {', '.join(sorted(addresses))}.")
    return values


#: By sha256 of what the encoder reads, as answers have it.
ECTransfers = Annotated[
    dict[ShortText, ECTransferParams],
    BeforeValidator(_check_num_transfers),
    AfterValidator(_check_one_address),
]


class GenerateRequest(FailFastModel):
    """Fields of every request that generates text, except the prompt and sampling."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: ModelName | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    priority: Priority | None = 0
    service_tier: Tier | None = None
    metadata: Metadata | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: KVTransferParams | None = None
    ec_transfer_params: ECTransfers | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None

    @property
    def sticky_key(self) -> str:
        """The client's identifier of its user or conversation; "" without one."""
        fields = self.model_extra or {}
        hints = (self.user, fields.get("safety_identifier"), fields.get("prompt_cache_key"))
        return next((hint for hint in hints if isinstance(hint, str) and hint), "")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name in cls.UNSUPPORTED.keys() & data.keys():
            value = data[name]
            if value is not None and value not in cls.UNSUPPORTED[name]:
                # Not a ValueError, so pydantic doesn't catch it.
                raise RejectedRequest(UnsupportedField(f"'{name}' is not supported.", param=name))
        return data

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RejectedRequest(
                InvalidRequest(
                    "stream_options may only be set when stream is true.", param="stream_options"
                )
            )
        return self

    def resolve_service_tier(self, max_priority: int) -> tuple[int, str | None]:
        """Return the priority to run at, and the service tier; None if none was requested.

        For callers that may not run earlier, the tier "priority" becomes "default".
        """
        tier = self.service_tier
        if self.priority or tier is None:
            return self.priority or 0, None if tier is None else "default"
        if tier == "flex":
            return FLEX_PRIORITY, "flex"
        if tier == "priority" and max_priority >= -PRIORITY_PRIORITY:
            return PRIORITY_PRIORITY, "priority"
        return 0, "default"

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        asked = self.stream_options is not None and self.stream_options.include_usage
        return bool(asked) or settings.QUIRE.force_include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        options = self.stream_options
        return bool(options and options.continuous_usage_stats and self.include_usage)

    @property
    def tokens_as_ids(self) -> bool:
        """Whether log probabilities identify tokens by id."""
        asked = self.return_tokens_as_token_ids
        return settings.QUIRE.return_tokens_as_token_ids if asked is None else asked

    def ignored_fields(self) -> list[str]:
        """Return the names of ignored fields: see `unsupported_field_names`."""
        return unsupported_field_names(self.model_extra or {}, self.UNSUPPORTED)


def unsupported_field_names(extra: Mapping[str, Any], neutral: Collection[str]) -> list[str]:
    """Return the names of unknown fields and of ignored hints.

    `neutral`: names of fields whose values were already checked to change nothing.

    Raises: `InvalidRequest` for an unknown field in strict mode.
    """
    names = sorted(name for name, value in extra.items() if value is not None)
    unknown = [name for name in names if name not in neutral and name not in IGNORED_HINTS]
    if unknown and settings.QUIRE.strict:
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {unknown[0][:100]}.",
            param=unknown[0][:100],
            code="unknown_parameter",
        )
    return sorted(
        [
            *unknown,
            *(
                name
                for name in names
                if name in IGNORED_HINTS and extra[name] not in IGNORED_HINTS[name]
            ),
        ]
    )


class RejectedRequest(Exception):
    """Carries a `QuireError` through pydantic, which would convert a ValueError."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(error.message)
        self.error = error


#: Unsupported except in chat completions, whose requests may choose the template if the operator
#: allows it. SDKs merge `extra_body` into the body before they send it.
TEMPLATE_FIELDS: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "extra_body": ({},),
}


class StrictRequest(FailFastModel):
    """A body whose unsupported fields are refused by name, and whose unknown ones are named.

    `UNSUPPORTED`: fields that we know and don't support, with the values that change nothing.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = TEMPLATE_FIELDS

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        for name in cls.UNSUPPORTED.keys() & (data if isinstance(data, dict) else {}):
            if data[name] is not None and data[name] not in cls.UNSUPPORTED[name]:
                raise RejectedRequest(UnsupportedField(f"'{name}' is not supported.", param=name))
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.check()
        except InvalidRequest as error:
            raise RejectedRequest(error) from None
        return self

    def check(self) -> None:
        """Check constraints between fields. Raises `InvalidRequest`."""

    def ignored_fields(self) -> list[str]:
        """Return the names of ignored fields: see `unsupported_field_names`."""
        return unsupported_field_names(self.model_extra or {}, self.UNSUPPORTED)


#: A field of a chat's function in the `param` of an error.
_FUNCTION = re.compile(r"tools\[(\d+)\]\.function(?:\.(\w+))?")
FieldNames = TypeVar("FieldNames", bound=QuireError)


def rename_error_field(
    error: FieldNames,
    names: Mapping[str, str],
    function: Callable[[str, str], str] | None = None,
) -> FieldNames:
    """Rename an error's field to the client's name.

    Args:
        names: prefix of a field -> the client's name; the first match counts.
        function: returns the client's name of a function's field, by the tool's index and field.
    """
    ours = error.param or ""
    renamed = ours
    for mine, theirs in names.items():
        if ours == mine or ours.startswith((f"{mine}.", f"{mine}[")):
            renamed = theirs + ours[len(mine) :]
            break
    if function is not None and (match := _FUNCTION.match(ours)):
        renamed = function(match[1], match[2] or "") + ours[match.end() :]
    if renamed != ours:
        error.rename(renamed)
    return error
