"""What tenants store, on either database: rows, leases, ends."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from common.errors import Conflict, NotFound, StorageFull, TooManyPending
from engine.contract.errors import InvalidRequest
from storage import access, actions, ownership
from storage.access import (
    access_batch,
    access_file,
    access_response,
    access_response_chain,
    claimable_batches,
    unclaimed_responses,
)
from storage.actions.batches import journal_paths
from storage.blobs import blob_path
from storage.models import Batch, BatchStatus, StoredFile, StoredResponse
from tenants.authentication import Caller
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


@pytest.fixture(autouse=True)
def _files_dir(tmp_path: Path, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)


def caller_of(tenant: Any, key: Any = None) -> Caller:
    return Caller(
        tenant_id=tenant.pk,
        tenant=tenant.slug,
        key_id=key.pk if key else None,
        user_id=None,
        cache_namespace="",
        weight=1.0,
        max_priority=0,
        scopes=frozenset(),
        requests_per_minute=None,
        tokens_per_minute=None,
    )


@pytest.fixture
def acme(world: World) -> Caller:
    return caller_of(world.acme, world.key)


def batch_of(caller: Caller) -> Batch:
    file = actions.create_file(
        caller=caller, filename="in.jsonl", purpose="batch", size=3, chunks=[b"{}\n"]
    )
    return actions.create_batch(
        caller=caller,
        input_file_id=file.public_id,
        endpoint="/v1/completions",
        completion_window="24h",
        window_s=86_400,
        metadata={"note": "nul \0"},
    )


def response_of(caller: Caller, number: int, previous: str = "", **fields: Any) -> StoredResponse:
    return actions.store_response(
        caller=caller,
        public_id=f"resp_{number:032x}",
        status="completed",
        request={"input": "nul \0"},
        input_items=[{"content": "nul \0"}],
        body={"output": []},
        previous_id=previous,
        **fields,
    )


def test_a_batch_from_its_making_to_its_end(acme: Caller) -> None:
    batch = batch_of(acme)
    assert claimable_batches() == [batch.public_id]
    row = actions.claim_batch(public_id=batch.public_id, owner="a", seconds=30)
    assert row is not None
    assert actions.claim_batch(public_id=batch.public_id, owner="b", seconds=30) is None
    assert claimable_batches() == []
    row = actions.start_batch(row=row, total=2)
    assert (row.status, row.total) == (BatchStatus.IN_PROGRESS, 2)
    usage = {"input": 3}
    assert actions.update_progress(row=row, completed=1, failed=0, usage=usage) == "in_progress"
    assert actions.renew_lease(row=row, owner="a", seconds=30)
    assert not actions.renew_lease(row=row, owner="b", seconds=30)
    output, errors = journal_paths(row)
    output.write_bytes(b"1\n2\n")
    ends = {
        "row": row,
        "status": BatchStatus.COMPLETED,
        "output": output,
        "errors": errors,
        "counts": {"completed": 2, "failed": 0, "usage": usage},
        "problems": [],
    }
    done = actions.finish_batch(**ends)
    again = actions.finish_batch(**ends)  # a worker that had lost its lease without knowing
    assert again.output_file_id == done.output_file_id
    stored_batch = access_batch(acme, batch.public_id)
    assert (stored_batch.status, stored_batch.completed, stored_batch.usage) == (
        "completed",
        2,
        usage,
    )
    assert stored_batch.metadata == {"note": "nul \0"}
    assert stored_batch.error_file is None
    assert stored_batch.output_file is not None
    assert access_file(acme, stored_batch.output_file.public_id).size == 4
    assert blob_path(acme.tenant_id, stored_batch.output_file.public_id).read_bytes() == b"1\n2\n"
    with pytest.raises(Conflict):
        actions.cancel_batch(caller=acme, public_id=batch.public_id)


def test_tenants_take_turns_at_the_workers(world: World, acme: Caller, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"running_batches": 2})
    mine = [batch_of(acme).public_id for _ in range(4)]
    theirs = batch_of(caller_of(world.rival)).public_id
    assert claimable_batches() == [mine[0], theirs, mine[1]]
    row = actions.claim_batch(public_id=mine[0], owner="a", seconds=30)
    assert claimable_batches() == [theirs, mine[1]]  # who has one running waits for who has none
    assert actions.claim_batch(public_id=mine[1], owner="a", seconds=30) is not None
    assert claimable_batches() == [theirs]
    assert actions.claim_batch(public_id=mine[2], owner="a", seconds=30) is None
    assert row is not None
    actions.fail_batch(row=row, errors=[])
    assert claimable_batches() == [theirs, mine[2]]


def test_a_tenant_may_have_only_so_much_waiting(acme: Caller, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"open_batches": 1})
    first = batch_of(acme)
    with pytest.raises(TooManyPending) as caught:
        batch_of(acme)
    assert (caught.value.status, caught.value.error_type) == (429, "rate_limit_error")
    actions.fail_batch(row=first, errors=[])
    batch_of(acme)


def test_a_batch_that_has_ended_fails_no_more(acme: Caller) -> None:
    row = batch_of(acme)
    Batch.objects.update(status=BatchStatus.COMPLETED)
    assert actions.fail_batch(row=row, errors=[{"code": "x"}]).status == BatchStatus.COMPLETED


def test_a_lease_runs_out_or_is_given_back(acme: Caller) -> None:
    batch = batch_of(acme)
    row = actions.claim_batch(public_id=batch.public_id, owner="a", seconds=-1)
    assert row is not None
    row = actions.claim_batch(public_id=batch.public_id, owner="b", seconds=30)
    assert row is not None
    actions.release_lease(row=row, owner="a")  # not a's any more
    assert claimable_batches() == []
    actions.release_lease(row=row, owner="b")
    assert claimable_batches() == [batch.public_id]
    actions.cancel_batch(caller=acme, public_id=batch.public_id)
    assert actions.start_batch(row=row, total=1).status == BatchStatus.CANCELLING


def test_what_a_dead_process_held_is_free_at_once(acme: Caller) -> None:
    dead, alive = batch_of(acme), batch_of(acme)
    for row, process in ((dead, 17), (alive, 170)):
        owner = f"{actions.owner_of(process)}x"
        assert actions.claim_batch(public_id=row.public_id, owner=owner, seconds=30)
    assert claimable_batches() == []
    assert actions.release_leases_of_dead(process=17) == 1
    assert claimable_batches() == [dead.public_id]


def test_a_conversation_goes_back_to_its_beginning(acme: Caller) -> None:
    first = response_of(acme, 1)
    second = response_of(acme, 2, first.public_id)
    rows, _ = access_response_chain(acme, second.public_id)
    assert [row.public_id for row in rows] == [first.public_id, second.public_id]
    assert rows[0].input_items == [{"content": "nul \0"}]
    actions.delete_response(caller=acme, public_id=first.public_id)
    with pytest.raises(NotFound) as caught:
        access_response_chain(acme, second.public_id)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("limit", ["MAX_TURNS", "MAX_CONVERSATION_CHARS"])
def test_a_conversation_is_read_only_so_far(acme: Caller, monkeypatch: Any, limit: str) -> None:
    first = response_of(acme, 1)
    second = response_of(acme, 2, first.public_id)
    (row,), _ = access_response_chain(acme, first.public_id)
    assert access.MAX_TURNS == 1000
    monkeypatch.setattr(access, limit, 1 if limit == "MAX_TURNS" else row.chars - 1)
    assert len(access_response_chain(acme, first.public_id)[0]) == 1
    with pytest.raises(InvalidRequest) as caught:
        access_response_chain(acme, second.public_id)
    assert caught.value.param == "previous_response_id"


def test_answers_are_kept_for_the_days_that_the_operator_says(acme: Caller, settings: Any) -> None:
    row = response_of(acme, 1)
    assert row.expires_at is not None
    assert round((row.expires_at - row.created_at) / timedelta(days=1), 3) == 30
    settings.QUIRE = settings.QUIRE.replace(response_days=0)
    assert response_of(acme, 2).expires_at is None


def test_a_tenants_answers_may_take_only_so_much(acme: Caller, settings: Any) -> None:
    first = response_of(acme, 1)
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"stored_chars": 2 * first.size})
    ownership.check_storage_quota(acme.tenant_id)
    assert ownership.is_usage_cached(acme.tenant_id)
    second = response_of(acme, 2, background=True)
    with pytest.raises(StorageFull) as caught:
        ownership.check_storage_quota(acme.tenant_id)
    assert (caught.value.status, caught.value.param) == (413, "store")
    StoredResponse.objects.filter(pk=second.pk).update(status="queued")
    actions.update_response(row=second, status="completed", body={"output": ["x" * 100]})
    second.refresh_from_db()
    assert second.size > first.size + 100
    actions.delete_response(caller=acme, public_id=second.public_id)
    ownership.check_storage_quota(acme.tenant_id)  # who is full is looked at each time
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"stored_chars": 0})
    ownership.check_storage_quota(acme.tenant_id)


def test_a_tenant_without_room_makes_no_batches(acme: Caller, settings: Any) -> None:
    file = actions.create_file(
        caller=acme, filename="in.jsonl", purpose="batch", size=3, chunks=[b"{}\n"]
    )
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"file_bytes": 2})
    with pytest.raises(StorageFull):
        actions.create_batch(
            caller=acme,
            input_file_id=file.public_id,
            endpoint="/v1/completions",
            completion_window="24h",
            window_s=86_400,
            metadata={},
        )


def test_a_cancelled_response_stays_so(acme: Caller) -> None:
    row = response_of(acme, 1, background=True)
    StoredResponse.objects.update(status="queued")
    assert unclaimed_responses() == [row.public_id]
    assert actions.claim_response(public_id=row.public_id, owner="a", seconds=30) is not None
    actions.cancel_response(caller=acme, public_id=row.public_id)
    assert not actions.update_response(row=row, status="completed", body={"status": "completed"})
    assert access_response(acme, row.public_id).body["status"] == "cancelled"
    assert unclaimed_responses() == []


def test_fault_23_strangers_find_nothing(world: World, acme: Caller) -> None:
    rival = caller_of(world.rival)
    batch, response = batch_of(acme), response_of(acme, 1)
    for read in (
        lambda: access_batch(rival, batch.public_id),
        lambda: access_file(rival, batch.input_file_id),
        lambda: access_response(rival, response.public_id),
        lambda: actions.cancel_batch(caller=rival, public_id=batch.public_id),
        lambda: actions.delete_file(caller=rival, public_id=batch.input_file_id),
        lambda: actions.delete_response(caller=rival, public_id=response.public_id),
        lambda: access_file(acme, "../../etc/passwd"),
    ):
        with pytest.raises(NotFound):
            read()


def test_what_has_expired_goes_with_its_bytes(acme: Caller) -> None:
    batch = batch_of(acme)
    response_of(acme, 1)
    past = timezone.now() - timedelta(seconds=1)
    StoredFile.objects.update(expires_at=past)
    StoredResponse.objects.update(expires_at=past)
    assert actions.remove_expired() == 1  # the batch still needs its file
    assert blob_path(acme.tenant_id, batch.input_file_id).exists()
    Batch.objects.update(status="completed")
    assert actions.remove_expired() == 1
    assert not blob_path(acme.tenant_id, batch.input_file_id).exists()
    assert Batch.objects.count() == 1
