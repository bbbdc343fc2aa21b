"""Migrations match the models; `manage.py migrate` restores what an interrupted one left out."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.validators import MinLengthValidator
from django.db import models
from django.db.migrations.state import ProjectState

from config.autodetector import DatabaseAutodetector
from tests.database import NAME, with_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.database
@pytest.mark.django_db
def test_no_migration_is_missing() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_a_fields_words_and_rules_need_no_migration_but_its_length_does() -> None:
    detector = DatabaseAutodetector(ProjectState(), ProjectState())
    bare, described, longer = (
        detector.deep_deconstruct(field)
        for field in (
            models.CharField(max_length=3),
            models.CharField(
                "code",
                max_length=3,
                choices=[("a", "A")],
                error_messages={"unique": "taken"},
                help_text="A code.",
                validators=[MinLengthValidator(2)],
            ),
            models.CharField(max_length=4),
        )
    )
    assert bare == described != longer


@pytest.mark.system
def test_what_a_killed_first_start_left_out_is_made_by_the_next(tmp_path: Path) -> None:
    triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger' ORDER BY name"
    permissions = "SELECT count(*) FROM auth_permission"
    with closing(sqlite3.connect(with_tables(tmp_path) / NAME)) as database:
        (initial,) = database.execute(permissions).fetchone()
        database.executescript("DROP TRIGGER audit_no_delete; DELETE FROM auth_permission")
    command = [sys.executable, "manage.py", "migrate", f"--data-dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        assert database.execute(triggers).fetchall() == [("audit_no_delete",), ("audit_no_update",)]
        assert database.execute(permissions).fetchone() == (initial,)
