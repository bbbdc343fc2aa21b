"""What the endpoints answer that are about the service: health, load, operators' commands."""

from __future__ import annotations

from typing import Any, Literal

from inference.openapi.answers import Answer


class Bucket(Answer):
    """What was used in a span of time, a result a group."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[dict[str, Any]]


class Report(Answer):
    """A page of buckets, the oldest first."""

    object: Literal["page"]
    data: list[Bucket]
    has_more: bool
    next_page: str | None


class Health(Answer):
    """The installation's health. Insiders see more than the status."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str] = []
    warnings: list[str] = []
    models: dict[str, Any] = {}


class Status(Answer):
    """This process answers."""

    status: Literal["ok"]


class Version(Answer):
    """The version of Quire."""

    version: str


class Told(Answer):
    """What each replica said to a command; `status` and `success` are vLLM's words for it."""

    ok: bool
    replicas: dict[str, Any]
    status: str | None = None
    success: bool | None = None


class IsSleeping(Answer):
    """Whether any replica sleeps, and each of them."""

    is_sleeping: bool
    replicas: dict[str, bool]


class IsPaused(Answer):
    """Whether any replica is paused, and each of them."""

    is_paused: bool
    replicas: dict[str, bool]


class Load(Answer):
    """Requests that run or wait."""

    server_load: int
    replicas: dict[str, Any]


class ServerInfo(Answer):
    """What runs here."""

    version: str
    gateway: dict[str, Any]
    replicas: dict[str, Any]
