"""The app of log-in, which adapts django-allauth."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Log-in with django-allauth. It has no models of its own."""

    name = "accounts"
    verbose_name = "Accounts"

    def ready(self) -> None:
        """Listen to what allauth does by itself."""
        from accounts import reauthentication, signals  # noqa: F401 - they register by being imported
