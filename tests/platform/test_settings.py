"""Settings as a process sees them, from its environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINT = """
import json, sys
sys.path[:0] = ["platform"]
from config import settings
names = sys.argv[1:]
print(json.dumps({name: getattr(settings, name) for name in names}, default=str))
"""


def settings_with(tmp_path: Path, *names: str, **env: str) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "REDIS_", "DATAB"))}
    done = subprocess.run(
        [sys.executable, "-c", PRINT, *names],
        cwd=ROOT,
        env={**clean, "QUIRE_DATA_DIR": str(tmp_path), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def test_the_embedded_default_needs_no_variable_and_is_closed(tmp_path: Path) -> None:
    found = settings_with(
        tmp_path, "DEBUG", "ALLOWED_HOSTS", "REDIS_URL", "SECRET_KEY", "TLS", "DATABASES"
    )
    assert found["DEBUG"] is False
    assert found["ALLOWED_HOSTS"] == ["localhost", "127.0.0.1", "[::1]"]
    assert found["REDIS_URL"].startswith("unix://")
    assert found["SECRET_KEY"] == (tmp_path / "secret_key").read_text()
    assert found["DATABASES"]["default"]["ENGINE"].endswith("sqlite3")


def test_production_is_made_of_variables_and_leaves_the_data_dir_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "none"
    found = settings_with(
        tmp_path,
        *("SECRET_KEY", "REDIS_URL", "DATABASES", "CELERY_BROKER_URL", "ALLOWED_HOSTS", "QUIRE"),
        QUIRE_DATA_DIR=str(data_dir),
        QUIRE_SECRET_KEY="s" * 60,
        DATABASE_URL="postgres://u:p@db/quire",
        REDIS_URL="redis://cache:6379/1",
        QUIRE_ALLOWED_HOSTS="llm.example.org, .internal",
        QUIRE_KEY_PREFIX="blue",
    )
    assert found["SECRET_KEY"] == "s" * 60
    assert found["REDIS_URL"] == found["CELERY_BROKER_URL"] == "redis://cache:6379/1"
    assert found["DATABASES"]["default"]["HOST"] == "db"
    assert found["ALLOWED_HOSTS"] == ["llm.example.org", ".internal"]
    assert found["QUIRE"]["KEY_PREFIX"] == "blue"
    assert not data_dir.exists()


NAMES = ("SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_SSL_REDIRECT")


@pytest.mark.parametrize("tls", ["proxy", "direct"])
def test_behind_tls_cookies_are_secure_and_browsers_are_told_to_stay(
    tmp_path: Path, tls: str
) -> None:
    found = settings_with(tmp_path, *NAMES, "SECURE_HSTS_SECONDS", QUIRE_TLS=tls)
    assert all(found[name] for name in NAMES)
    assert found["SECURE_HSTS_SECONDS"] > 30_000_000


def test_a_clients_own_forwarded_header_counts_only_behind_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="SECURE_PROXY_SSL_HEADER"):
        settings_with(tmp_path, "SECURE_PROXY_SSL_HEADER", QUIRE_TLS="direct")
    assert settings_with(tmp_path, "SECURE_PROXY_SSL_HEADER", QUIRE_TLS="proxy")


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="QUIRE_TLS must be one of off, proxy, direct"):
        settings_with(tmp_path, "TLS", QUIRE_TLS="yes")


def test_nothing_is_pickled(tmp_path: Path) -> None:
    found = settings_with(
        tmp_path, "CELERY_ACCEPT_CONTENT", "CELERY_TASK_SERIALIZER", "CELERY_RESULT_SERIALIZER"
    )
    assert found == {
        "CELERY_ACCEPT_CONTENT": ["json"],
        "CELERY_TASK_SERIALIZER": "json",
        "CELERY_RESULT_SERIALIZER": "json",
    }


def test_djangos_deployment_check_is_clean_behind_tls(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={
            **os.environ,
            "QUIRE_DATA_DIR": str(tmp_path),
            "QUIRE_TLS": "proxy",
            "QUIRE_HSTS_SUBDOMAINS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
