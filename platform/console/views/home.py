"""Context of the home page: problems, first steps, today's usage, the slowest requests."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.core.cache import cache
from django.urls import reverse

from catalog.models import DesiredState, ServedModel
from console.views.base import end_of, start_of
from engine.system.host import available_memory, num_usable_cpus
from history.alerts import ERROR_SHARE, MIN_REQUESTS, access_alerts
from metering.access import UsageQuery, UsageTotals, report
from metering.budgets import access_budgets, states_of
from metering.models import RequestEntry
from metering.request_log import access_requests
from tenants.access import access_keys, access_members
from tenants.actors import to_actor
from tenants.models import Tenant, User

logger = logging.getLogger(__name__)

#: Root of Linux's hardware monitors.
SENSORS = Path("/sys/class")
#: Timeout of `nvidia-smi`, and how long its output is cached: a call takes tens of milliseconds.
GPU_TIMEOUT_S, GPU_CACHE_S = 5.0, 10
#: Maximum number and age of the requests that failures and slowness are judged by.
MAX_REQUESTS = 1000
RECENT = timedelta(hours=1)
MAX_SLOWEST = 5
MAX_BUDGETS = 200
#: Spent percentage of a budget from which the home page warns.
BUDGET_WARNING_PERCENT = 90.0


@dataclass(frozen=True)
class Problem:
    """Something that prevents requests from being served. `url`: the page to fix it on."""

    text: str
    url: str
    since: datetime | None = None


@dataclass(frozen=True)
class Step:
    """A first step in a new installation or tenant. `url`: the page to do it on."""

    title: str
    url: str
    is_done: bool


@dataclass(frozen=True)
class Gpu:
    """A GPU. Sizes are in bytes; `temperature_c` is None if the driver doesn't report it."""

    name: str
    temperature_c: float | None
    used_memory: int
    total_memory: int


@dataclass(frozen=True)
class Host:
    """A machine. Sizes are in bytes; `load` is the load average of the last minute.

    `temperature_c`: highest of its sensors, None without sensors.
    """

    name: str
    cores: int
    load: float
    free_memory: int
    total_memory: int
    free_disk: int
    total_disk: int
    temperature_c: float | None
    gpus: list[Gpu]


def home_context(user: User, tenant: Tenant | None) -> dict[str, Any]:
    """Template context about a tenant, or about the installation if None."""
    recent = list(
        access_requests(user, tenant)
        .filter(started_at__gte=datetime.now(UTC) - RECENT)
        .defer("detail")[:MAX_REQUESTS]
    )
    served = [entry for entry in recent if entry.status < 300]
    steps = list(_first_steps(user, tenant))
    return {
        "problems": [
            *(_open_alerts(user) if to_actor(user).is_operator else _error_problems(recent)),
            *(_budget_problems(user, tenant) if tenant else ()),
        ],
        "steps": steps if not all(step.is_done for step in steps) else [],
        "today": _usage_today(tenant),
        "host": this_host() if tenant is None else None,
        "slowest": nlargest(MAX_SLOWEST, served, key=lambda entry: entry.duration_ms),
        "requests_query": urlencode({"tenant": tenant.slug} if tenant else {"all": "yes"}),
    }


def _open_alerts(user: User) -> Iterator[Problem]:
    for alert in access_alerts(user).filter(finished_at=None):
        yield Problem(alert.text, reverse("alerts"), alert.started_at)


def _error_problems(recent: list[RequestEntry]) -> Iterator[Problem]:
    """A warning about a high share of failed requests."""
    failed = [entry for entry in recent if entry.status >= 500]
    if len(recent) >= MIN_REQUESTS and len(failed) >= ERROR_SHARE * len(recent):
        share = 100 * len(failed) / len(recent)
        text = f"{share:.0f} % of the last {len(recent)} requests failed"
        url = f"{reverse('requests')}?status=5xx"
        yield Problem(text, url, min(entry.started_at for entry in failed))


def _budget_problems(user: User, tenant: Tenant) -> Iterator[Problem]:
    """Budgets that are exhausted or nearly so."""
    for state in states_of(list(access_budgets(user, tenant)[:MAX_BUDGETS])):
        if state.percent >= BUDGET_WARNING_PERCENT:
            text = f"{state.percent:.0f} % of a budget is spent: {state.budget}"
            yield Problem(text, reverse("budgets"))


def _first_steps(user: User, tenant: Tenant | None) -> Iterator[Step]:
    """Steps before the first request, in order."""
    if to_actor(user).is_operator:
        loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED).exists()
        yield Step("Load a model", reverse("add-model"), loaded)
        yield Step("Create a tenant", reverse("tenants"), Tenant.objects.exists())
    asked = access_requests(user, tenant).exists()
    yield Step("Ask something in the playground", reverse("playground"), asked)
    if tenant is not None:
        has_key = access_keys(user, tenant).filter(revoked_at=None).exists()
        yield Step("Create an API key", reverse("keys"), has_key)
        has_members = len(access_members(user, tenant)[:2]) > 1
        yield Step("Invite the first member", reverse("members"), has_members)


def this_host() -> Host:
    """The machine that this gateway runs on."""
    disk = shutil.disk_usage(settings.DATA_DIR)
    return Host(
        name=socket.gethostname(),
        cores=num_usable_cpus(len(os.sched_getaffinity(0))),
        load=os.getloadavg()[0],
        free_memory=available_memory(),
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_disk=disk.free,
        total_disk=disk.total,
        temperature_c=hottest_sensor_c(SENSORS),
        gpus=list_gpus(),
    )


def hottest_sensor_c(folder: Path) -> float | None:
    """The highest temperature of Linux's hardware monitors, in degrees Celsius."""
    values = []
    for file in folder.glob("hwmon/hwmon*/temp*_input"):
        with contextlib.suppress(OSError, ValueError):  # sensors of a sleeping device fail
            values.append(int(file.read_text()) / 1000)
    return max(values, default=None)


def list_gpus() -> list[Gpu]:
    """This machine's NVIDIA GPUs as `nvidia-smi` lists them, at most every 10 s."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    gpus = cache.get("console:gpus")
    if gpus is None:
        gpus = _ask_nvidia_smi(program)
        cache.set("console:gpus", gpus, GPU_CACHE_S)
    return [Gpu(*fields) for fields in gpus]


def _ask_nvidia_smi(program: str) -> list[list[Any]]:
    """Fields of `Gpu`; empty if the tool fails, for example without a driver."""
    query = "--query-gpu=name,temperature.gpu,memory.used,memory.total"
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi failed: %s", error)
        return []
    gpus: list[list[Any]] = []
    for line in result.stdout.splitlines():
        name, temperature, used, total = (field.strip() for field in line.rsplit(",", 3))
        has_reading = temperature.replace(".", "", 1).isdigit()
        sizes = [int(size) << 20 if size.isdigit() else 0 for size in (used, total)]
        gpus.append([name, float(temperature) if has_reading else None, *sizes])
    return gpus


def _usage_today(tenant: Tenant | None) -> UsageTotals:
    """Usage since midnight, UTC."""
    today = datetime.now(UTC).date()
    query = UsageQuery(
        start=start_of(today),
        end=end_of(today),
        width="1d",
        tenants=None if tenant is None else [tenant.pk],
    )
    return next(iter(report(query, total=True)), UsageTotals(query.start))
