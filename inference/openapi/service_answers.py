"""What the endpoints answer that are about the service: health, load, operators' commands."""

from __future__ import annotations

from typing import Any, Literal

from inference.openapi.answers import Answer


class Health(Answer):
    """How the installation is."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str]
    models: dict[str, Any]


class Status(Answer):
    """This process answers."""

    status: Literal["ok"]


class Version(Answer):
    """Which Quire this is."""

    version: str


class Told(Answer):
    """What each replica said to a command."""

    ok: bool
    replicas: dict[str, Any]


class IsSleeping(Answer):
    """Whether any replica sleeps, and each of them."""

    is_sleeping: bool
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
