"""Keys, channels and hash fields in Redis."""

from __future__ import annotations

KEY_PREFIX = "quire"


def replica_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of a replica's heartbeat."""
    return f"{prefix}:replica:{replica_id}"


def replicas_key(prefix: str = KEY_PREFIX) -> str:
    """Key of the set of replica ids."""
    return f"{prefix}:replicas"


def owner_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of the incarnation that serves under a replica's id."""
    return f"{prefix}:owner:{replica_id}"


def replica_events_channel(prefix: str = KEY_PREFIX) -> str:
    """Channel of `ReplicaEvent`s."""
    return f"{prefix}:news"


def inbox_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of a replica's inbox stream."""
    return f"{prefix}:inbox:{replica_id}"


def log_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of the last log lines of a replica."""
    return f"{prefix}:log:{replica_id}"


def load_report_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of a replica's load report by layer."""
    return f"{prefix}:layers:{replica_id}"


def outbox_key(gateway_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of a gateway process's outbox stream."""
    return f"{prefix}:outbox:{gateway_id}"


def progress_key(gateway_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of a gateway's read positions in its outbox: "request/output" -> tokens."""
    return f"{prefix}:progress:{gateway_id}"


def written_tokens_key(prefix: str = KEY_PREFIX) -> str:
    """Key of the engine's own count of written tokens, which the ledger is checked against."""
    return f"{prefix}:written"


def output_field(request_id: str, index: int) -> str:
    """Field of `written_tokens_key`'s hash: the output's tokens so far, over all attempts."""
    return f"{request_id}/{index}"


def prompt_field(request_id: str) -> str:
    """Field of `written_tokens_key`'s hash: the request's prompt tokens."""
    return f"{request_id}/p"


def stream_key(stream: str, prefix: str = KEY_PREFIX) -> str:
    """Key of an open stream of a gateway: a hash.

    `open` says how to continue it, `epoch` counts takeovers, `prompt` and `billed` are the tokens
    that were settled when it was abandoned, `numerics:N` identifies the numerics of its request N,
    `told` is set once tokens were sent to the client.
    """
    return f"{prefix}:stream:{stream}"


#: Prefix of the id of a request that only computes another's prompt.
_PREFILL = "prefill:"


def prefill_request_id(request_id: str) -> str:
    """Id of the request that computes a request's prompt on a prefill replica."""
    return _PREFILL + request_id


def is_prefill_request(request_id: str) -> bool:
    """Whether a request only computes another's prompt: its token is discarded."""
    return request_id.startswith(_PREFILL)


def prefilled_request_id(request_id: str) -> str:
    """Id of the request whose prompt a request computes; other requests' own id."""
    return request_id.removeprefix(_PREFILL)


def base_request_id(request_id: str) -> str:
    """A request's id without the number of its attempt: the gateways' id of it."""
    return request_id.partition("~")[0]
