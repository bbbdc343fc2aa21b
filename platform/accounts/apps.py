"""How people log in, allauth's glue."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """How people log in, allauth's glue: no models."""

    name = "accounts"
    verbose_name = "Accounts"

    def ready(self) -> None:
        """Listen to what allauth does by itself."""
        from accounts import reauthentication, signals  # noqa: F401 - they register by being imported
