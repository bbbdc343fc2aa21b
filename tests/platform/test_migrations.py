"""Migrations say what the models say, and take older databases along."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from config.squashed import half_way
from tests.database import NAME, with_tables

ROOT = Path(__file__).resolve().parents[2]
#: What `.dump` says of a folder's database.
OLD_FOLDER = Path(__file__).parent / "folders" / "2026_11_22.sql"
SQUASHED = {
    "tenants": "0001_squashed_0004_conversations",
    "catalog": "0001_squashed_0005_last_exit_fallbacks_idle",
    "metering": "0001_squashed_0006_requests",
    "storage": "0001_squashed_0005_items_and_uploads",
}


@pytest.mark.database
@pytest.mark.django_db
def test_no_migration_is_missing() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def steps(app: str) -> list[str]:
    """What an app's squashed step stands for, in order."""
    from importlib import import_module

    found = import_module(f"{app}.migrations.{SQUASHED[app]}").Migration.replaces
    return [name for _, name in found]


@pytest.mark.database
@pytest.mark.django_db
def test_a_database_that_went_through_all_steps_is_up_to_date() -> None:
    recorder = MigrationRecorder(connection)
    for app, squashed in SQUASHED.items():
        recorder.record_unapplied(app, squashed)
        for name in steps(app):
            recorder.record_applied(app, name)
    call_command("migrate", verbosity=0)  # it would stumble over tables that are there
    for app, squashed in SQUASHED.items():
        assert (app, squashed) in recorder.applied_migrations()


def tables(database: Any) -> dict[str, tuple[set[object], set[object]]]:
    """Each table's columns (name, type, may be null, primary key) and indexes, in any order."""
    listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    names = [name for (name,) in listed if not name.startswith("sqlite_")]
    found = {}
    for name in names:
        table = f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{name}')"
        of = "(SELECT group_concat(name) FROM pragma_index_info(i.name))"
        index = f"SELECT \"unique\", {of} FROM pragma_index_list('{name}') AS i"
        found[name] = set(database.execute(table)), set(database.execute(index))
    return found


@pytest.mark.system
@pytest.mark.django_db
def test_a_folder_that_an_earlier_quire_made_opens_with_all_that_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "quire.sqlite3"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(OLD_FOLDER.read_text())
    command = [sys.executable, "manage.py", "migrate", "--data-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with closing(sqlite3.connect(path)) as old, connection.cursor() as fresh:
        assert tables(old) == tables(fresh)
        key = "SELECT tenant_id, public_id, name FROM tenants_apikey"
        assert old.execute(key).fetchall() == [(1, "WHwaSO8w80", "old")]
        ledger = "SELECT request_id, prompt_tokens, cost_nanos FROM metering_usageentry"
        assert old.execute(ledger).fetchall() == [("req-1", 3, 11000)]


@pytest.mark.django_db
@pytest.mark.parametrize("stopped", ["0001_initial", "0001_squashed_0006_sign_on"])
def test_a_database_that_stopped_half_way_is_refused_with_what_to_do(stopped: str) -> None:
    recorder = MigrationRecorder(connection)
    assert half_way(connection) == []
    recorder.record_unapplied("tenants", SQUASHED["tenants"])
    for name in steps("tenants"):
        recorder.record_unapplied("tenants", name)
    recorder.record_applied("tenants", stopped)
    with pytest.raises(CommandError, match="Open it once with a Quire of that month"):
        call_command("migrate", verbosity=0)


def parts(statement: str) -> frozenset[str]:
    """What stands between the brackets of a CREATE TABLE, in any order."""
    found, depth = [""], 0
    for letter in statement[statement.index("(") + 1 : statement.rindex(")")]:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return frozenset(part.strip() for part in found)


def schema(path: Path) -> dict[tuple[str, str], object]:
    """All tables, indexes and triggers, and the rows that migrations write."""
    with closing(sqlite3.connect(path)) as database:
        listed = database.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master")
        found: dict[tuple[str, str], object] = {
            (kind, name): parts(sql) if kind == "table" else sql for kind, name, sql in listed
        }
        for columns, table in (
            ("app, name", "django_migrations"),
            ("app_label, model", "django_content_type"),
            ("codename, name", "auth_permission"),
        ):
            rows = database.execute(f"SELECT {columns} FROM {table}")
            found["rows", table] = set(rows)
    return found


@pytest.mark.system
def test_a_first_start_makes_the_tables_that_the_steps_make(tmp_path: Path) -> None:
    def migrate(folder: str, *words: str) -> None:
        command = [sys.executable, "manage.py", "migrate", *words, "--verbosity=0", "--skip-checks"]
        command.append(f"--data-dir={tmp_path / folder}")
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)

    migrate("steps", "contenttypes")  # not empty any more: the rest goes step by step
    migrate("steps")
    made = schema(with_tables(tmp_path / "quick") / NAME)
    assert made == schema(tmp_path / "steps" / "quire.sqlite3")
    assert ("trigger", "audit_no_delete") in made


@pytest.mark.system
def test_what_a_killed_first_start_left_out_is_made_by_the_next(tmp_path: Path) -> None:
    with closing(sqlite3.connect(with_tables(tmp_path) / NAME)) as database:
        database.executescript("DROP TRIGGER audit_no_delete; DELETE FROM auth_permission")
    command = [sys.executable, "manage.py", "migrate", f"--data-dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    made = schema(tmp_path / NAME)
    assert ("trigger", "audit_no_delete") in made
    assert made["rows", "auth_permission"]
