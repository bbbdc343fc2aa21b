"""Migrations say what the models say, and take older databases along."""

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from config.squashed import half_way

SQUASHED = {
    "tenants": "0001_squashed_0006_sign_on",
    "catalog": "0001_squashed_0003_aliases",
    "metering": "0001_squashed_0004_webhooks",
    "storage": "0001_squashed_0003_sizes",
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


@pytest.mark.django_db
def test_a_database_that_stopped_half_way_is_refused_with_what_to_do() -> None:
    recorder = MigrationRecorder(connection)
    assert half_way(connection) == []
    recorder.record_unapplied("tenants", SQUASHED["tenants"])
    for name in steps("tenants"):
        recorder.record_unapplied("tenants", name)
    recorder.record_applied("tenants", "0001_initial")
    with pytest.raises(CommandError, match="Open it once with a Quire of that month"):
        call_command("migrate", verbosity=0)
