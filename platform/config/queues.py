"""Celery's queues: which task goes into which queue, and how long it may take there.

A queue has its own workers or processes, so a task that hangs doesn't delay other queues.
"""

from __future__ import annotations

#: Served by threads of one process. Tasks here return soon; batches, background responses and
#: adapter checks continue outside these threads.
THREAD_QUEUES = ("jobs", "periodic")
THREADS = 4
#: Number of child processes per queue: a task that takes too long is killed with its process.
PROCESS_QUEUES = {"delivery": 2, "identity": 1, "maintenance": 2}

ROUTES = {
    "inference.run": {"queue": "jobs"},
    "adapters.check": {"queue": "jobs"},
    "history.write": {"queue": "periodic"},
    "history.alerts": {"queue": "maintenance"},
    "inference.sweep": {"queue": "periodic"},
    "adapters.sweep": {"queue": "periodic"},
    "adapters.pins": {"queue": "periodic"},
    "metering.alerts": {"queue": "periodic"},
    "metering.deliver": {"queue": "delivery"},
    "metering.deliveries": {"queue": "delivery"},
    "config.send_mail": {"queue": "delivery"},
    "console.sign_on": {"queue": "identity"},
    "console.check_user": {"queue": "identity"},
    "metering.retention": {"queue": "maintenance"},
    "metering.check_sums": {"queue": "maintenance"},
    "history.forget": {"queue": "maintenance"},
    "tenants.audit_retention": {"queue": "maintenance"},
    "tenants.erase": {"queue": "maintenance"},
    "tenants.erasures": {"queue": "maintenance"},
    "accounts.clear_sessions": {"queue": "maintenance"},
    "inference.expire": {"queue": "maintenance"},
}
#: Seconds until a task gets SoftTimeLimitExceeded, and until its process is killed. Outgoing
#: requests have timeouts below the first.
TIME_LIMITS = {"delivery": (15, 20), "identity": (15, 20), "maintenance": (900, 960)}

ANNOTATIONS = {
    name: dict(zip(("soft_time_limit", "time_limit"), TIME_LIMITS[route["queue"]], strict=True))
    for name, route in ROUTES.items()
    if route["queue"] in TIME_LIMITS
}
