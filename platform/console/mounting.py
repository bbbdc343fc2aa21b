"""Addresses of what has no name in `config.urls` to reverse, below `--root-path`."""

from django.urls import get_script_prefix


def mounted(path: str) -> str:
    """`path`, such as "/ws/kv/", as browsers reach it."""
    return get_script_prefix() + path.removeprefix("/")
