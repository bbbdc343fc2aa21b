"""Paths that lead nowhere: what to tell, with the path that was likely meant."""

from __future__ import annotations

from typing import Any

from django.urls import Resolver404, resolve

from tenants.errors import NotFound

URLCONF = "inference.urls"
ROOT = "/v1"


def unknown_path(path: str) -> NotFound:
    """The error for a path that isn't there. It names the same path below /v1, if that is."""
    message = f"Unknown path: {path[:200]}."
    if path.startswith(f"{ROOT}{ROOT}/"):
        meant = path[len(ROOT) :]
    else:
        meant = ROOT + path
    if _is_there(meant):
        message += f" Did you mean {meant[:200]}?"
    elif not path.startswith(f"{ROOT}/"):
        message += " The API is below /v1, and /openapi.json lists all of it."
    return NotFound(message, code="unknown_url")


def _is_there(path: str) -> bool:
    """Whether an endpoint has this very path, and not just any."""
    try:
        view: Any = resolve(path, URLCONF).func
    except Resolver404:
        return False
    return not getattr(view.cls, "leads_nowhere", False)
