"""Paths below `--root-path` that have no URL name."""

from django.urls import get_script_prefix


def mounted(path: str) -> str:
    """Prefix an absolute path, such as "/ws/kv/", with the root path."""
    return get_script_prefix() + path.removeprefix("/")
