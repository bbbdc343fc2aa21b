"""Moving an instance from SQLite to PostgreSQL, as docs/install.md says."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.console.live import ROOT, environment
from tests.database import with_tables
from tests.services import running_postgresql

pytestmark = [pytest.mark.service, pytest.mark.slow]
#: All rows of all tables, as JSON; those of Django's own two tables have other numbers there.
ROWS = """
import django, json
django.setup()
from django.apps import apps
from django.core import serializers
skipped = {"contenttypes.ContentType", "auth.Permission"}
models = [model for model in apps.get_models() if model._meta.label not in skipped]
print(json.dumps({
    model._meta.label: json.loads(serializers.serialize("json", model.objects.order_by("pk")))
    for model in models
}))
"""


@pytest.mark.timeout(300)
def test_an_instance_moves_from_sqlite_to_postgresql(redis_url: str, tmp_path: Path) -> None:
    with running_postgresql() as url:
        sqlite = environment(with_tables(tmp_path / "data"), redis_url, f"m{uuid.uuid4().hex[:9]}")
        postgresql = sqlite | {"DATABASE_URL": url}
        for module in ("seed", "showcase"):
            python(sqlite, "-m", f"tests.console.{module}")
        file = str(tmp_path / "quire.json.gz")
        excluded = ("--exclude", "contenttypes", "--exclude", "auth.permission")
        python(sqlite, "manage.py", "dumpdata", *excluded, "--output", file)
        python(postgresql, "manage.py", "migrate")
        python(postgresql, "manage.py", "loaddata", file)
        initial_payload, after = (
            json.loads(python(env, "-c", ROWS)) for env in (sqlite, postgresql)
        )
        assert {name for name, rows in initial_payload.items() if rows != after[name]} == set()
        assert sum(map(len, initial_payload.values())) > 5000
        assert len(initial_payload["tenants.AuditEntry"]) > 5
        # What is created next takes a number of its own.
        key = python(postgresql, "manage.py", "create_key", "--tenant", "acme", "--plain")
        assert key.startswith("sk-quire-")
        assert "website" in python(postgresql, "manage.py", "list_keys", "--tenant", "northwind")


def python(env: dict[str, str], *words: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
