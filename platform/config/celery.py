"""The Celery application. `manage.py worker` runs it."""

import os

from celery import Celery
from celery.schedules import crontab

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("quire")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_configure.connect
def _schedule(sender: Celery, **_: object) -> None:
    """What beat asks for. A task that comes too late is left: the next is on its way."""
    from django.conf import settings

    every = float(settings.QUIRE["SWEEP_SECONDS"])
    sender.conf.beat_schedule = {
        "sweep": {"task": "inference.sweep", "schedule": every, "options": {"expires": every}},
        "adapters": {"task": "adapters.sweep", "schedule": every, "options": {"expires": every}},
        "pins": {"task": "adapters.pins", "schedule": every, "options": {"expires": every}},
        "alerts": {"task": "metering.alerts", "schedule": 60.0, "options": {"expires": 60.0}},
        "webhooks": {"task": "metering.deliveries", "schedule": 60.0, "options": {"expires": 60.0}},
        "sums": {"task": "metering.check_sums", "schedule": crontab(hour="1", minute="10")},
        "history": {"task": "history.write", "schedule": 10.0, "options": {"expires": 10.0}},
        "forget": {"task": "history.forget", "schedule": 300.0, "options": {"expires": 300.0}},
        "sign-on": {"task": "console.sign_on", "schedule": 60.0, "options": {"expires": 60.0}},
        "retention": {
            "task": "metering.retention",
            "schedule": 3600.0,
            "options": {"expires": 3600.0},
        },
        "audit": {
            "task": "tenants.audit_retention",
            "schedule": 3600.0,
            "options": {"expires": 3600.0},
        },
        "erasures": {"task": "tenants.erasures", "schedule": 300.0, "options": {"expires": 300.0}},
        "expire": {"task": "inference.expire", "schedule": 300.0, "options": {"expires": 300.0}},
    }
