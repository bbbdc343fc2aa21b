"""The adapters app: LoRA adapters."""

from typing import Any

from django.apps import AppConfig

from common.task_queue import send_task_best_effort


class AdaptersConfig(AppConfig):
    """Adapters, their versions, and which version answers under which name."""

    name = "adapters"
    verbose_name = "LoRA adapters"

    def ready(self) -> None:
        """Connect the dispatch of waiting versions to workers; register tenant data and model
        names.
        """
        from adapters.access import names_for
        from adapters.signals import adapters_changed, version_waits
        from adapters.tenant_data import register_data_kinds
        from tenants.access import register_name_source

        version_waits.connect(_send, dispatch_uid="adapters.send")
        adapters_changed.connect(_tell_pins, dispatch_uid="adapters.pins")
        register_data_kinds()
        register_name_source(names_for)


def _send(version: Any, **_: object) -> None:
    from adapters.tasks import CHECK

    send_task_best_effort(CHECK, version.pk)


def _tell_pins(adapter: Any, **_: object) -> None:
    """Update pins after a change of a pinned adapter; the periodic task does it for others."""
    from adapters.pins import TASK

    if adapter.pinned:
        send_task_best_effort(TASK)
