"""The web console's app."""

from django.apps import AppConfig


class ConsoleConfig(AppConfig):
    """The web console. It has no models of its own."""

    name = "console"
    verbose_name = "Console"
