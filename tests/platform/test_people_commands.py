"""The commands for people, members, invitations and service accounts."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Invitation, Membership, ServiceAccount, User
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db]
PASSWORD = "a quiet page of ink"


def run(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


def test_people_are_added_changed_and_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(f"{PASSWORD}\n"))
    run("create_user", "nina", "--email", "nina@example.org", "--password-stdin")
    nina = User.objects.get(username="nina")
    assert nina.check_password(PASSWORD)
    assert not nina.is_superuser
    run("update_user", "nina", "--operator", "--email", "n@example.org")
    rows = {row.split()[0]: row.split()[1:] for row in run("list_users").splitlines()}
    assert rows["nina"] == ["n@example.org", "operator", "-"]
    assert rows["member"] == ["member@example.org", "active", "acme:member"]
    run("update_user", "nina", "--off", "--no-operator")
    assert "deactivated" in run("list_users")
    run("delete_user", "nina")
    assert not User.objects.filter(username="nina").exists()
    kinds = set(AuditEntry.objects.filter(action__startswith="user.").values_list("actor_kind"))
    assert kinds == {("command",)}


def test_who_is_deactivated_loses_keys(world: World) -> None:
    run("update_user", "member", "--off")
    assert ApiKey.objects.get(pk=world.key.pk).state() == "revoked"


def test_passwords_come_by_standard_input(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(f"{PASSWORD}\n"))
    run("set_password", "member", "--password-stdin")
    world.member.refresh_from_db()
    assert world.member.check_password(PASSWORD)
    run("set_password", "member", "--none")
    world.member.refresh_from_db()
    assert not world.member.has_usable_password()
    monkeypatch.setattr("sys.stdin", StringIO(""))
    with pytest.raises(CommandError, match="No password on standard input"):
        run("set_password", "member", "--password-stdin")


def test_members_are_put_in_changed_and_taken_out(world: World) -> None:
    run("set_member", "outsider", "--tenant", "acme", "--role", "admin")
    run("set_member", "outsider", "--tenant", "acme", "--role", "viewer")
    assert Membership.objects.get(user=world.outsider, tenant=world.acme).role == "viewer"
    rows = [row.split()[:3] for row in run("list_members", "--tenant", "acme").splitlines()]
    assert ["acme", "outsider", "viewer"] in rows
    assert ["rival", "outsider", "owner"] not in rows
    run("remove_member", "outsider", "--tenant", "acme")
    with pytest.raises(CommandError, match="isn't a member of acme"):
        run("remove_member", "outsider", "--tenant", "acme")
    with pytest.raises(CommandError, match="needs at least one owner"):
        run("remove_member", "owner", "--tenant", "acme")


def test_invitations_are_made_listed_and_taken_back(world: World, settings: Any) -> None:
    words = ("invite", "n@example.org", "--tenant", "acme", "--role", "viewer")
    link = run(*words, "--url", "https://quire.example/").strip()
    assert link.startswith("https://quire.example/invitation/")
    token = link.split("/")[-2]
    assert actions.get_open_invitation(token).email == "n@example.org"
    invitation = Invitation.objects.get()
    assert run("list_invitations").splitlines()[1].split()[:4] == [
        str(invitation.pk),
        "acme",
        "n@example.org",
        "viewer",
    ]
    run("revoke_invitation", str(invitation.pk))
    assert len(run("list_invitations").splitlines()) == 1
    assert "revoked" in run("list_invitations", "--all")
    with pytest.raises(CommandError, match="Invitation 999 not found"):
        run("revoke_invitation", "999")


def test_an_invitation_needs_to_know_where_people_come(
    world: World, settings: Any, tmp_path: Any
) -> None:
    settings.DATA_DIR = tmp_path
    with pytest.raises(CommandError, match="Name --url"):
        run("invite", "n@example.org", "--tenant", "acme")
    assert not Invitation.objects.exists()
    (tmp_path / "instance.json").write_text('{"url": "http://127.0.0.1:8000"}')
    assert run("invite", "n@example.org", "--tenant", "acme").startswith("http://127.0.0.1:8000/")


def test_programs_are_added_given_keys_and_retired(world: World) -> None:
    run("create_service_account", "nightly reports", "--tenant", "acme")
    words = ("create_key", "--tenant", "acme", "--plain")
    run(*words, "--service-account", "nightly reports")
    account = ServiceAccount.objects.get()
    assert account.api_keys.get().state() == "active"
    assert "nightly reports" in run("list_service_accounts", "--tenant", "acme")
    run("retire_service_account", "nightly reports", "--tenant", "acme")
    assert account.api_keys.get().state() == "revoked"
    with pytest.raises(CommandError, match="no service account 'x'"):
        run(*words, "--service-account", "x")


@pytest.mark.parametrize(
    "words",
    [
        ("update_user", "nobody", "--off"),
        ("delete_user", "nobody"),
        ("set_password", "nobody", "--none"),
        ("set_member", "nobody", "--tenant", "acme"),
    ],
)
def test_somebody_who_is_not_there_is_named(world: World, words: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match="User 'nobody' not found"):
        run(*words)
    with pytest.raises(CommandError, match="Nothing to change"):
        run("update_user", "member")


def test_the_last_operator_stays(world: World) -> None:
    with pytest.raises(CommandError, match="at least one operator"):
        run("delete_user", "operator")
    actions.create_user(actor=SYSTEM_ACTOR, username="second", is_superuser=True)
    run("delete_user", "operator")


def test_djangos_own_commands_leave_audit_rows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SUPERUSER_PASSWORD", PASSWORD)
    run("createsuperuser", "--no-input", "--username", "otto", "--email", "otto@example.org")
    audit_entry = AuditEntry.objects.get(action="user.create", target_label="otto")
    assert (audit_entry.actor_kind, audit_entry.details["changes"]["is_superuser"]) == (
        "command",
        [None, True],
    )
    initial_session_epoch = User.objects.get(username="otto").session_epoch
    answers = iter(["short", "short", PASSWORD, "another", f"{PASSWORD} too", f"{PASSWORD} too"])
    monkeypatch.setattr("getpass.getpass", lambda prompt="": next(answers))
    call_command("changepassword", "otto", stdout=StringIO(), stderr=StringIO())
    otto = User.objects.get(username="otto")
    assert otto.check_password(f"{PASSWORD} too")
    assert otto.session_epoch == initial_session_epoch + 1
    entry = AuditEntry.objects.get(action="user.set_password")
    assert (entry.actor_kind, entry.target_label) == ("command", "otto")
