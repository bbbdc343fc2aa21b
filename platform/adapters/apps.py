"""The app of LoRA adapters."""

from typing import Any

from django.apps import AppConfig

from tenants.work import hint


class AdaptersConfig(AppConfig):
    """Adapters, their versions, and which version answers under which name."""

    name = "adapters"
    verbose_name = "LoRA adapters"

    def ready(self) -> None:
        """Versions that wait are handed to a worker; what is kept of tenants is named."""
        from adapters.events import version_waits
        from adapters.holdings import register_all

        version_waits.connect(_send, dispatch_uid="adapters.send")
        register_all()


def _send(version: Any, **_: object) -> None:
    from adapters.tasks import CHECK

    hint(CHECK, version.pk)
