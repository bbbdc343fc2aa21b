"""The gateway's settings: `settings.QUIRE`, typed, with defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from engine.contract.errors import InvalidRequest
from engine.contract.redis_keys import KEY_PREFIX
from inference.errors import UnsupportedField

# -- Variables of a model's chat template that a request or the operator may set.


#: Names that `render_chat` gives a meaning of its own.
RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenizer",
        "limits",
        "content_format",
        "most_tokens",
    }
)


def check_template_kwargs(names: Iterable[str]) -> None:
    """Raise `InvalidRequest` for a name that no variable may have."""
    for name in names:
        if name == "chat_template":
            raise UnsupportedField(
                "chat_template_kwargs can't hold a chat template.",
                param="chat_template_kwargs.chat_template",
            )
        if name in RESERVED_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"chat_template_kwargs can't hold {name[:50]!r}.", param="chat_template_kwargs"
            )


MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Each field is a key of `settings.QUIRE` in capitals (`MAX_BODY_BYTES`).

    Attributes:
        key_prefix: of all keys in Redis.
        max_body_bytes: a larger request body is refused with 413 while it comes in.
        max_file_bytes: a larger file is refused with 413 while it comes in.
        upload_timeout_s: a file that takes longer to arrive is refused with 408.
        batch_concurrency: requests of one batch that run at a time in a worker.
        batch_priority: what a batch's requests are given; larger runs later.
        max_batch_requests: lines in a batch's file.
        lease_seconds: a worker that is silent for so long has lost its work to another.
        body_timeout_s: a body that takes longer to arrive is refused with 408.
        max_json_depth: arrays and objects inside each other in a body.
        strict: refuse unknown fields with 400 instead of naming them in a header.
        request_chat_templates: let clients send `chat_template` in the body.
        chat_template_content_format: how chat templates get a message's content: "string", "openai"
            (a list of parts) or "auto", what each template's source tells.
        response_role: the role that answers to chats have.
        default_chat_template_kwargs: variables of chat templates, where a chat doesn't set them.
        return_tokens_as_token_ids: name tokens by id in log probabilities, unless a request says.
        force_include_usage: streams end with their usage, whether they asked for it or not.
        per_request_metrics: have answers tell how long they took, see `generation.figures`.
        max_prompts: prompts in one completions request.
        max_choices: prompts times `n` in one request.
        max_pooling_tokens: tokens of all texts in one request for embeddings, scores or labels.
        max_pooling_result_bytes: of all vectors in one answer, as float32.
        tenant_idempotency_bytes: what the answers kept for one tenant's idempotency keys may take.
        failover_wait_s: how long a request waits for a replica to come (back).
        max_attempts: replicas that may die in a row over a request alone, or of an unknown cause,
            before it's taken for what kills them.
        stream_start_wait_s: a stream that has no token yet after so long sends its headers; until
            then an error is still an HTTP status.
        sse_heartbeat_s: a comment line after so long without a token; 0: none.
        render_timeout_s: for one prompt's template and tokenisation.
        render_threads: threads that render long prompts.
        inline_render_chars: prompts up to this length are rendered on the event loop.
        affinity_slack: requests that a replica may be ahead of the idlest and still be chosen for
            the prefixes it holds.
        gc_threshold: container objects by which a look of the garbage collector at the newest ones
            comes; 0 leaves it as Python has it.
        metrics_token: what Prometheus may send as a bearer token; "": none.
        metrics_addresses: IP networks that may read `/metrics` and all of `/health` without a key.
        metrics_tenants: how many tenants `/metrics` tells apart; those that come later are "other".
        otlp_traces_endpoint: where spans are sent, see `engine.contract.observability`; "":
        nowhere.
        health_grace_s: how long `progress_at` may stand still before `/health` is red.
    """

    key_prefix: str = KEY_PREFIX
    max_body_bytes: int = 10 * MIB
    max_file_bytes: int = 200 * MIB
    upload_timeout_s: float = 1800.0
    batch_concurrency: int = 8
    batch_priority: int = 100
    max_batch_requests: int = 50_000
    lease_seconds: float = 30.0
    body_timeout_s: float = 60.0
    max_json_depth: int = 64
    strict: bool = False
    request_chat_templates: bool = False
    chat_template_content_format: str = "auto"
    response_role: str = "assistant"
    default_chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    per_request_metrics: bool = False
    max_prompts: int = 2048
    max_choices: int = 2048
    max_pooling_tokens: int = 300_000
    max_pooling_result_bytes: int = 48 * MIB
    tenant_idempotency_bytes: int = 16 * MIB
    failover_wait_s: float = 30.0
    max_attempts: int = 5
    stream_start_wait_s: float = 10.0
    sse_heartbeat_s: float = 15.0
    render_timeout_s: float = 20.0
    render_threads: int = 2
    inline_render_chars: int = 4096
    affinity_slack: int = 8
    gc_threshold: int = 1_000
    metrics_token: str = dataclasses.field(default="", repr=False)
    metrics_addresses: tuple[str, ...] = ()
    metrics_tenants: int = 100
    otlp_traces_endpoint: str = dataclasses.field(default="", repr=False)
    health_grace_s: float = 20.0

    def __post_init__(self) -> None:
        try:
            check_template_kwargs(self.default_chat_template_kwargs)
        except InvalidRequest as error:
            raise ImproperlyConfigured(f"DEFAULT_CHAT_TEMPLATE_KWARGS: {error.message}") from error


@lru_cache(maxsize=1)
def gateway_settings() -> GatewaySettings:
    """What `settings.QUIRE` says; keys that belong to other apps are left alone."""
    known = {spec.name for spec in dataclasses.fields(GatewaySettings)}
    given = {key.lower(): value for key, value in getattr(settings, "QUIRE", {}).items()}
    return GatewaySettings(**{key: given[key] for key in known & given.keys()})


def redis_url() -> str:
    """Where Redis is."""
    return str(settings.REDIS_URL)


def _forget(*, setting: str, **_: Any) -> None:
    """Read the settings again after `override_settings`."""
    if setting == "QUIRE":
        gateway_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="inference.settings")
