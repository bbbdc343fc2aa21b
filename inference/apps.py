"""The Django app of the gateway. It has no models: its state is in Redis and in open streams."""

from django.apps import AppConfig


class InferenceConfig(AppConfig):
    """OpenAI-compatible endpoints, the engine client, the playground's socket."""

    name = "inference"
    verbose_name = "Gateway"
