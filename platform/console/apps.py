"""The web console's app."""

from django.apps import AppConfig


class ConsoleConfig(AppConfig):
    """No models: it shows what the other apps know."""

    name = "console"
    verbose_name = "Console"

    def ready(self) -> None:
        """Listen to what allauth does by itself."""
        from console.identity import recent, signals  # noqa: F401 - they register by being imported
