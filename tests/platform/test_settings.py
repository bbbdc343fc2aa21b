"""Settings as a process sees them, from its environment."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]


def settings_with(tmp_path: Path, *names: str, **env: str) -> dict[str, Any]:
    """Settings by name, as a process with these variables would have them."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "REDIS_", "DATAB"))}
    environment = {**clean, "QUIRE_DATA_DIR": str(tmp_path), **env}
    with mock.patch.dict(os.environ, environment, clear=True):
        values = runpy.run_path(str(ROOT / "platform" / "config" / "settings.py"))
    return json.loads(json.dumps({name: values[name] for name in names}, default=_to_json))


def _to_json(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def test_the_embedded_default_needs_no_variable_and_is_closed(tmp_path: Path) -> None:
    environment = settings_with(
        tmp_path, "DEBUG", "ALLOWED_HOSTS", "REDIS_URL", "SECRET_KEY", "DATABASES"
    )
    assert environment["DEBUG"] is False
    assert environment["ALLOWED_HOSTS"] == ["localhost", "127.0.0.1", "[::1]"]
    assert environment["REDIS_URL"].startswith("unix://")
    assert environment["SECRET_KEY"] == (tmp_path / "secret_key").read_text()
    assert environment["DATABASES"]["default"]["ENGINE"].endswith("sqlite3")


def test_production_is_made_of_variables_and_leaves_the_data_dir_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "none"
    environment = settings_with(
        tmp_path,
        *("SECRET_KEY", "REDIS_URL", "DATABASES", "CELERY_BROKER_URL", "ALLOWED_HOSTS", "QUIRE"),
        QUIRE_DATA_DIR=str(data_dir),
        QUIRE_SECRET_KEY="s" * 60,
        DATABASE_URL="postgres://u:p@db/quire",
        REDIS_URL="redis://cache:6379/1",
        QUIRE_ALLOWED_HOSTS="llm.example.org, .internal",
        QUIRE_KEY_PREFIX="blue",
    )
    assert environment["SECRET_KEY"] == "s" * 60
    assert environment["REDIS_URL"] == environment["CELERY_BROKER_URL"] == "redis://cache:6379/1"
    assert environment["DATABASES"]["default"]["HOST"] == "db"
    assert environment["ALLOWED_HOSTS"] == ["llm.example.org", ".internal"]
    assert environment["QUIRE"]["key_prefix"] == "blue"
    assert not data_dir.exists()


NAMES = ("SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_SSL_REDIRECT")


@pytest.mark.parametrize("tls", ["proxy", "direct"])
def test_behind_tls_cookies_are_secure_and_browsers_are_told_to_stay(
    tmp_path: Path, tls: str
) -> None:
    environment = settings_with(tmp_path, *NAMES, "SECURE_HSTS_SECONDS", QUIRE_TLS=tls)
    assert all(environment[name] for name in NAMES)
    assert environment["SECURE_HSTS_SECONDS"] > 30_000_000


def test_a_clients_own_forwarded_header_counts_only_behind_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="SECURE_PROXY_SSL_HEADER"):
        settings_with(tmp_path, "SECURE_PROXY_SSL_HEADER", QUIRE_TLS="direct")
    assert settings_with(tmp_path, "SECURE_PROXY_SSL_HEADER", QUIRE_TLS="proxy")


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match="QUIRE_TLS must be 'off', 'proxy' or 'direct'"):
        settings_with(tmp_path, QUIRE_TLS="yes")


def test_nothing_is_pickled(tmp_path: Path) -> None:
    environment = settings_with(
        tmp_path, "CELERY_ACCEPT_CONTENT", "CELERY_TASK_SERIALIZER", "CELERY_RESULT_SERIALIZER"
    )
    assert environment == {
        "CELERY_ACCEPT_CONTENT": ["json"],
        "CELERY_TASK_SERIALIZER": "json",
        "CELERY_RESULT_SERIALIZER": "json",
    }


@pytest.mark.system
def test_djangos_deployment_check_is_clean_behind_tls(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={
            **os.environ,
            "QUIRE_DATA_DIR": str(tmp_path),
            "QUIRE_TLS": "proxy",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_mail_needs_a_server_and_a_sender(tmp_path: Path) -> None:
    names = ("EMAIL_BACKEND", "EMAIL_HOST", "EMAIL_PORT", "EMAIL_HOST_PASSWORD", "EMAIL_USE_TLS")
    assert settings_with(tmp_path, "EMAIL_BACKEND")["EMAIL_BACKEND"].endswith("dummy.EmailBackend")
    url = "smtp+starttls://quire:p%40ss@mail.example"
    environment = settings_with(
        tmp_path, *names, QUIRE_SMTP_URL=url, QUIRE_MAIL_FROM="q@mail.example"
    )
    assert list(environment.values())[1:] == ["mail.example", 587, "p@ss", True]
    for invalid in (
        {"QUIRE_SMTP_URL": url},
        {"QUIRE_SMTP_URL": "mail", "QUIRE_MAIL_FROM": "q@x.y"},
    ):
        with pytest.raises(ImproperlyConfigured, match="QUIRE_"):
            settings_with(tmp_path, "EMAIL_BACKEND", **invalid)


def test_addresses_that_read_metrics_are_addresses(tmp_path: Path) -> None:
    environment = settings_with(tmp_path, "QUIRE", QUIRE_METRICS_ADDRESSES="10.0.0.0/8, 127.0.0.1")
    assert environment["QUIRE"]["metrics_addresses"] == ["10.0.0.0/8", "127.0.0.1/32"]
    with pytest.raises(ImproperlyConfigured, match="QUIRE_METRICS_ADDRESSES"):
        settings_with(tmp_path, "QUIRE", QUIRE_METRICS_ADDRESSES="10.0.0.1/8")


PROVIDER = {
    "QUIRE_OIDC_ISSUER": "https://id.example",
    "QUIRE_OIDC_CLIENT_ID": "quire",
    "QUIRE_OIDC_CLIENT_SECRET": "s",
}


def test_an_identity_provider_and_its_groups_are_read(tmp_path: Path) -> None:
    roles = "a=b=acme:owner, ops=operator"
    environment = settings_with(
        tmp_path, "SOCIALACCOUNT_PROVIDERS", "QUIRE", **PROVIDER, QUIRE_OIDC_ROLES=roles
    )
    (app,) = environment["SOCIALACCOUNT_PROVIDERS"]["openid_connect"]["APPS"]
    assert (app["client_id"], app["settings"]["server_url"]) == ("quire", "https://id.example")
    assert environment["QUIRE"]["oidc_roles"] == {"a=b": "acme:owner", "ops": "operator"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUIRE_OIDC_ISSUER", "http://id.example"),
        ("QUIRE_OIDC_CLIENT_ID", ""),
        ("QUIRE_OIDC_CLIENT_SECRET", ""),
        ("QUIRE_OIDC_ROLES", "ops"),
        ("QUIRE_OIDC_ROLES", "ops=acme:god"),
        ("QUIRE_OIDC_ROLES", "ops=:owner"),
        ("QUIRE_MFA_ROLES", "everybody"),
    ],
)
def test_wrong_identity_settings_are_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=name):
        settings_with(tmp_path, **{**PROVIDER, name: value})


@pytest.mark.system
def test_a_mistyped_data_dir_of_a_command_that_reads_makes_nothing(tmp_path: Path) -> None:
    """`up` and its like begin a folder; everything else wants the one that is there."""
    missing = tmp_path / "wrnog"
    for words in (["list_models"], ["status", "--help"]):
        done = subprocess.run(
            [sys.executable, "manage.py", *words, "--data-dir", str(missing)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode != 0
        assert done.stderr.startswith(f"There is no data dir {missing}: is the name right?")
    assert not missing.exists()


def test_instances_have_different_cookies_which_outlive_a_rotation_of_the_key(
    tmp_path: Path,
) -> None:
    names = ("SESSION_COOKIE_NAME", "CSRF_COOKIE_NAME")
    initial_environment = settings_with(tmp_path, *names, QUIRE_SECRET_KEY="old")
    other = settings_with(tmp_path, *names, QUIRE_SECRET_KEY="other")
    rotating = settings_with(
        tmp_path, *names, QUIRE_SECRET_KEY="new", QUIRE_SECRET_KEY_FALLBACKS="old"
    )
    assert initial_environment == rotating
    assert not {*initial_environment.values()} & {*other.values()}
    assert initial_environment["SESSION_COOKIE_NAME"] != initial_environment["CSRF_COOKIE_NAME"]


def test_the_pool_of_connections_has_a_size(tmp_path: Path) -> None:
    environment = settings_with(
        tmp_path, "DATABASES", DATABASE_URL="postgres://db/quire?pool_size=7"
    )
    assert environment["DATABASES"]["default"]["OPTIONS"]["pool"]["max_size"] == 7
    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL must have a pool_size of at lea"):
        settings_with(tmp_path, "DATABASES", DATABASE_URL="postgres://db/quire?pool_size=0")


def test_a_command_hands_fields_without_a_variable_to_what_it_starts(tmp_path: Path) -> None:
    fields = json.dumps({"cors_methods": ["GET"], "engine_command": ["replica"]})
    environment = settings_with(tmp_path, "QUIRE", "CORS_ALLOW_METHODS", QUIRE_INTERNAL=fields)
    assert environment["QUIRE"]["engine_command"] == ["replica"]
    assert environment["CORS_ALLOW_METHODS"] == ["GET"]
