"""The app that owns the commands of the whole product: `up` and `chat`."""

from django.apps import AppConfig


class ConfigConfig(AppConfig):
    """No models: settings, and the commands that start everything."""

    name = "config"
    verbose_name = "Quire"
