"""The app of logins, which adapts django-allauth."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Login with django-allauth. This app has no models."""

    name = "accounts"
    verbose_name = "Accounts"

    def ready(self) -> None:
        """Connect the signal receivers."""
        from accounts import reauthentication, signals  # noqa: F401 - importing connects receivers
