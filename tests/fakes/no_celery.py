"""A Celery application that no worker listens to: tests do the work themselves."""

from typing import Any


class _NoApplication:
    def send_task(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


application = _NoApplication()
