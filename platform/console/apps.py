"""The web console's app."""

from django.apps import AppConfig


class ConsoleConfig(AppConfig):
    """No models: it shows what the other apps know."""

    name = "console"
    verbose_name = "Console"
