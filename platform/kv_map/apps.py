"""The map of a replica's KV blocks."""

from django.apps import AppConfig


class KvMapConfig(AppConfig):
    """The map of a replica's KV blocks. This app has no models."""

    name = "kv_map"
    verbose_name = "KV map"
