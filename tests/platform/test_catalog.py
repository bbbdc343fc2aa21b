"""Which models there are, for whom, and loading them."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.utils import timezone

from catalog import access, actions
from catalog.engine_settings import engine_flags, replica_command
from catalog.models import Replica, ReplicaState, ServedModel
from catalog.replica_rows import ReplicaSnapshot, sync_replica_rows
from common.db import save_valid
from common.errors import Conflict, ModelNotFound, PermissionDenied, ServiceUnavailable
from common.files import INSTANCE_FILE
from config.management.commands import run
from engine.contract.engine_config import EngineConfig, add_cli_args
from engine.contract.errors import InvalidRequest
from tenants.actors import SYSTEM_ACTOR
from tenants.authentication import Caller, authenticate
from tenants.models import AuditEntry
from tests.platform.conftest import World

database = pytest.mark.database
SHARED_TIER = {"settings": {"kv_offloading_size": 1, "kv_offloading_backend": "/tier"}}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Something that looks like a model folder."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


async def caller_of(world: World) -> Caller:
    return await authenticate(f"Bearer {world.secret}")


# -- reading ----------------------------------------------------------------------------------


@database
@pytest.mark.django_db(transaction=True)
async def test_callers_see_loaded_models_that_are_theirs(world: World) -> None:
    await ServedModel.objects.acreate(name="open", source="/m", desired_state="loaded")
    await ServedModel.objects.acreate(name="idle", source="/m")
    for name, tenant in (("acmes", world.acme), ("rivals", world.rival)):
        model = await ServedModel.objects.acreate(
            name=name, source="/m", desired_state="loaded", public=False, max_model_len=128
        )
        await model.tenants.aadd(tenant)
    caller = await caller_of(world)
    cards = await access.access_models(caller)
    assert [card.id for card in cards] == ["acmes", "open"]
    card = await access.access_model(caller, "acmes")
    assert (card.max_model_len, card.owned_by, card.root) == (128, "quire", "acmes")
    assert abs(card.created - timezone.now().timestamp()) < 60


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["rivals", "idle", "nothing", "", "x" * 10_000, "\0", "../m"])
async def test_fault_23_a_strangers_model_is_404_like_one_that_is_not_there(
    world: World, name: str
) -> None:
    model = await ServedModel.objects.acreate(
        name="rivals", source="/m", desired_state="loaded", public=False
    )
    await model.tenants.aadd(world.rival)
    await ServedModel.objects.acreate(name="idle", source="/m")
    with pytest.raises(ModelNotFound) as caught:
        await access.access_model(await caller_of(world), name)
    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert len(error.message) < 400


@pytest.mark.django_db(transaction=True)
async def test_with_the_database_away_models_go_on_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ServedModel.objects.acreate(name="open", source="/m", desired_state="loaded")
    caller = await caller_of(world)
    await access.access_model(caller, "open")
    now = access._cards._clock()
    monkeypatch.setattr(access._cards, "_clock", lambda: now + 30)

    def away(*_: object, **__: object) -> None:
        raise OperationalError("away")

    monkeypatch.setattr(ServedModel.objects, "filter", away)
    assert (await access.access_model(caller, "open")).id == "open"
    monkeypatch.setattr(access._cards, "_clock", lambda: now + access.STALE_S + 1)
    with pytest.raises(ServiceUnavailable):
        await access.access_model(caller, "open")


# -- loading ----------------------------------------------------------------------------------


@database
@pytest.mark.django_db
def test_loading_writes_the_wish_and_an_audit_row(folder: str) -> None:
    model = actions.load_model(
        actor=SYSTEM_ACTOR, name="m", source=folder, settings={"max_model_len": 64}
    )
    assert model.desired_state == "loaded"
    assert model.engine_settings == {
        "max_model_len": 64,
        "model": folder,
        "served_model_name": "m",
    }
    entry = AuditEntry.objects.get()
    assert (entry.action, entry.target_label) == ("model.load", "m")


@database
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"name": "m", "source": "/no/such/folder"}, "source"),
        ({"name": "m", "source": "./nothing"}, "source"),
        ({"name": "m", "source": "a\0b"}, "source"),
        ({"name": "m", "source": "  "}, "source"),
        ({"name": "m"}, "name"),
        ({"name": "bad name", "source": "org/model"}, "name"),
        ({"name": "m\n", "source": "org/model"}, "name"),
        ({"name": "", "source": "org/model"}, "name"),
        ({"name": "m", "source": "org/model", "settings": {"no_such": 1}}, "settings"),
        ({"name": "m", "source": "org/model", "settings": {"block_size": 17}}, "settings"),
        ({"name": "m", "source": "org/model", "settings": {"model": "/etc"}}, "settings"),
        ({"name": "m", "source": "org/model", "settings": {"dtype": "float8"}}, "settings"),
        ({"name": "m", "source": "org/model", "settings": {"reasoning_parser": "x"}}, "settings"),
        ({"name": "m", "source": "org/model", "settings": {"tool_call_parser": "x"}}, "settings"),
        ({"name": "m", "source": "org/model", "num_replicas": 0}, "num_replicas"),
        ({"name": "m", "source": "org/model", "num_replicas": 1000}, "num_replicas"),
        ({"name": "m", "source": "org/model", "desired": 1}, "desired"),
        ({"name": "m", "source": "org/model", "num_prefill": 1} | SHARED_TIER, "num_prefill"),
        (
            {"name": "m", "source": "org/model", "num_prefill": 1, "num_replicas": 2},
            "num_prefill",
        ),
        ({"name": "m", "source": "org/model", "num_encode": 1} | SHARED_TIER, "num_encode"),
        (
            {"name": "m", "source": "org/model", "num_encode": 1, "num_replicas": 2},
            "num_encode",
        ),
    ],
)
def test_bad_loads_are_refused_by_their_field(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        actions.load_model(actor=SYSTEM_ACTOR, **values)
    assert caught.value.param == param
    assert not ServedModel.objects.exists()


@database
@pytest.mark.django_db
def test_the_first_replicas_compute_prompts_for_the_others(folder: str) -> None:
    model = actions.load_model(
        actor=SYSTEM_ACTOR, name="m", source=folder, num_replicas=3, num_prefill=2, **SHARED_TIER
    )
    roles = [model.replica_settings(index)["kv_transfer_config"] for index in range(3)]
    assert roles == [{"kv_role": "kv_producer"}] * 2 + [{"kv_role": "kv_consumer"}]
    assert EngineConfig.from_mapping(model.replica_settings(0)).kv_transfer_config == roles[0]
    settings = {**SHARED_TIER["settings"], "kv_transfer_config": {"kv_role": "kv_both"}}
    with pytest.raises(InvalidRequest, match="kv_role") as caught:
        actions.update_model(actor=SYSTEM_ACTOR, model=model, settings=settings)
    assert caught.value.param == "num_prefill"
    model = actions.update_model(actor=SYSTEM_ACTOR, model=model, num_prefill=0)
    assert "kv_transfer_config" not in model.replica_settings(0)


@database
@pytest.mark.django_db
def test_replicas_after_those_encode_for_the_others(folder: str) -> None:
    model = actions.load_model(
        actor=SYSTEM_ACTOR, name="m", source=folder, num_replicas=2, num_encode=1, **SHARED_TIER
    )
    configs = [model.replica_settings(index) for index in range(2)]
    roles = [settings["ec_transfer_config"] for settings in configs]
    assert roles == [{"ec_role": "ec_producer"}, {"ec_role": "ec_consumer"}]
    assert all("kv_transfer_config" not in settings for settings in configs)
    assert EngineConfig.from_mapping(configs[0]).ec_transfer_config == roles[0]
    with pytest.raises(InvalidRequest, match="2 replicas") as caught:
        actions.update_model(actor=SYSTEM_ACTOR, model=model, num_prefill=1)
    assert caught.value.param == "num_prefill"
    model = actions.update_model(actor=SYSTEM_ACTOR, model=model, num_replicas=4, num_prefill=1)
    configs = [model.replica_settings(index) for index in range(4)]
    kv_roles = [settings["kv_transfer_config"]["kv_role"] for settings in configs]
    assert kv_roles == ["kv_producer", "kv_both", "kv_consumer", "kv_consumer"]
    ec_roles = [settings["ec_transfer_config"]["ec_role"] for settings in configs]
    assert ec_roles == ["ec_consumer", "ec_producer", "ec_consumer", "ec_consumer"]
    settings = {**SHARED_TIER["settings"], "ec_transfer_config": {"ec_role": "ec_both"}}
    with pytest.raises(InvalidRequest, match="ec_role") as caught:
        actions.update_model(actor=SYSTEM_ACTOR, model=model, settings=settings)
    assert caught.value.param == "num_encode"


@database
@pytest.mark.django_db
def test_a_folder_without_config_json_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        actions.load_model(actor=SYSTEM_ACTOR, name="m", source=str(tmp_path))


@database
@pytest.mark.django_db
def test_only_operators_load_unload_share_and_delete(world: World, folder: str) -> None:
    with pytest.raises(PermissionDenied):
        actions.load_model(actor=world.owner, name="m", source=folder)
    model = actions.load_model(actor=world.operator, name="m", source=folder)
    for operation in (
        lambda: actions.unload_model(actor=world.owner, model=model),
        lambda: actions.update_model(actor=world.owner, model=model, num_replicas=2),
        lambda: actions.delete_model(actor=world.owner, model=model),
        lambda: actions.share_model(actor=world.owner, model=model, tenants=[], public=True),
    ):
        with pytest.raises(PermissionDenied):
            operation()


@database
@pytest.mark.django_db
def test_fault_42_a_second_load_says_that_the_first_is_on_its_way(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    with pytest.raises(Conflict, match="being loaded already") as caught:
        actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    assert caught.value.status == 409
    Replica.objects.create(served_model=model, replica_id="r", state="ready")
    with pytest.raises(Conflict, match="loaded already"):
        actions.load_model(actor=SYSTEM_ACTOR, name="m")


@database
@pytest.mark.django_db
def test_fault_42_a_load_that_failed_is_tried_again(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder, num_replicas=2)
    row = Replica.objects.create(
        served_model=model, replica_id="r", state=ReplicaState.FAILED, detail="No room for it.\n"
    )
    serving = Replica.objects.create(served_model=model, replica_id="s", state="ready")
    with pytest.raises(Conflict, match="loaded already"):
        actions.load_model(actor=SYSTEM_ACTOR, name="m")
    serving.delete()
    assert actions.last_failure(model) == "No room for it."
    initial_changed_at = model.changed_at
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", settings={"max_model_len": 64})
    assert model.settings == {"max_model_len": 64}
    assert model.changed_at > initial_changed_at
    row.refresh_from_db()
    assert (row.state, row.detail) == (ReplicaState.PENDING, "")
    with pytest.raises(Conflict, match="being loaded already"):
        actions.load_model(actor=SYSTEM_ACTOR, name="m")
    # While the next try of a crash loop is on its way, what the last one said still stands.
    row.state, row.last_exit = ReplicaState.LOADING, "the replica was killed by SIGKILL"
    row.save()
    assert actions.last_failure(model) == "the replica was killed by SIGKILL"
    actions.load_model(actor=SYSTEM_ACTOR, name="m")


@database
@pytest.mark.django_db
def test_fault_42_a_load_while_draining_is_refused_until_the_replica_is_gone(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    replica = Replica.objects.create(
        served_model=model,
        replica_id="r",
        state=ReplicaState.DRAINING,
        last_seen=timezone.now(),
    )
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    for operation in (
        lambda: actions.load_model(actor=SYSTEM_ACTOR, name="m"),
        lambda: actions.delete_model(actor=SYSTEM_ACTOR, model=model),
    ):
        with pytest.raises(Conflict, match="still being unloaded"):
            operation()
    replica.state = ReplicaState.STOPPED
    replica.save()
    assert actions.load_model(actor=SYSTEM_ACTOR, name="m").desired_state == "loaded"


@database
@pytest.mark.django_db
def test_a_replica_that_nobody_saw_for_long_does_not_block_a_load(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    long_ago = timezone.now() - timedelta(minutes=5)
    Replica.objects.create(served_model=model, replica_id="r", state="ready", last_seen=long_ago)
    actions.load_model(actor=SYSTEM_ACTOR, name="m")


@database
@pytest.mark.django_db
@pytest.mark.parametrize("state", ["ready", "failed"])
def test_rows_of_a_machine_that_has_vanished_say_so(folder: str, state: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    for number, minutes in enumerate((0, 5)):
        seen = timezone.now() - timedelta(minutes=minutes)
        Replica.objects.create(
            served_model=model, replica_id=f"r{number}", state=state, last_seen=seen
        )
    sync_replica_rows([], {})
    states = Replica.objects.order_by("replica_id").values_list("state", flat=True)
    assert list(states) == [state, "stopped"]


@database
@pytest.mark.django_db
def test_a_row_says_when_its_replica_was_last_ready(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    times = []
    for state in (ReplicaState.LOADING, ReplicaState.READY, ReplicaState.FAILED):
        sync_replica_rows([ReplicaSnapshot("m-0", model.pk, state)], {})
        times.append(Replica.objects.get(replica_id="m-0").last_ready_at)
    assert times[0] is None
    assert times[1] == times[2] is not None


@database
@pytest.mark.django_db
def test_fault_42_a_name_that_was_taken_a_moment_ago_is_a_conflict(folder: str) -> None:
    late = ServedModel(name="m", source=folder)
    actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    with pytest.raises(Conflict):
        save_valid(late)


@database
@pytest.mark.django_db(transaction=True)
def test_fault_42_of_concurrent_loads_exactly_one_wins(folder: str) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def load() -> None:
        barrier.wait()
        try:
            actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
            outcomes.append("loaded")
        except Conflict as error:
            outcomes.append(error.code)
        finally:
            connection.close()

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["conflict", "conflict", "conflict", "loaded"]
    assert AuditEntry.objects.filter(action="model.load").count() == 1


@database
@pytest.mark.django_db
def test_unloading_what_is_not_loaded_is_a_conflict(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    with pytest.raises(Conflict, match="not loaded"):
        actions.unload_model(actor=SYSTEM_ACTOR, model=model)


@database
@pytest.mark.django_db
def test_a_loaded_model_is_not_deleted_and_an_unloaded_one_is(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    with pytest.raises(Conflict, match="unload it first"):
        actions.delete_model(actor=SYSTEM_ACTOR, model=model)
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    actions.delete_model(actor=SYSTEM_ACTOR, model=model)
    assert not ServedModel.objects.exists()
    assert AuditEntry.objects.filter(action="model.delete").exists()


@database
@pytest.mark.django_db
def test_a_model_is_loaded_again_with_other_settings(folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder, settings={"seed": 1})
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    assert actions.load_model(actor=SYSTEM_ACTOR, name="m").settings == {"seed": 1}
    actions.unload_model(actor=SYSTEM_ACTOR, model=model)
    assert actions.load_model(actor=SYSTEM_ACTOR, name="m", settings={}).settings == {}


@database
@pytest.mark.django_db
def test_sharing_is_audited_with_the_tenants_names(world: World, folder: str) -> None:
    model = actions.load_model(actor=SYSTEM_ACTOR, name="m", source=folder)
    actions.share_model(actor=world.operator, model=model, tenants=[world.rival], public=False)
    assert not access.access_served_models(world.acme).exists()
    entry = AuditEntry.objects.get(action="model.share")
    assert entry.details == {"public": False, "tenants": ["rival"]}


# -- command lines ----------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_parser_may_be_a_plug_in_another_name_or_none(folder: str, settings: Any) -> None:
    parser = "inference.parsers.reasoning_families.Qwen3Parser"
    settings.QUIRE = settings.QUIRE.replace(reasoning_parsers={"ours": parser})
    for name in ("ours", "olmo3", "none"):
        fields = {"reasoning_parser": name, "tool_call_parser": "openai"}
        model = actions.load_model(actor=SYSTEM_ACTOR, name=name, source=folder, settings=fields)
        assert model.settings == fields
    settings.QUIRE = settings.QUIRE.replace(reasoning_parsers={})
    ours = ServedModel.objects.get(name="ours")
    with pytest.raises(InvalidRequest, match=r"'ours' here\. There are: none, cohere_command3,"):
        actions.update_model(actor=SYSTEM_ACTOR, model=ours, num_replicas=2)
    actions.unload_model(actor=SYSTEM_ACTOR, model=ours)  # as it always can be


def test_flags_come_back_as_the_same_settings() -> None:
    import argparse

    settings = {
        "model": "-odd name",
        "served_model_name": "m",
        "dtype": "float32",
        "max_model_len": 64,
        "cpu_kvcache_space": 0.5,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "cudagraph_capture_sizes": [1, 2, 64],
        "optimization_level": 3,
        "revision": None,
    }
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    parsed = EngineConfig.from_cli_args(parser.parse_args(engine_flags(settings)))
    assert parsed == EngineConfig.from_mapping(settings)


def test_a_replicas_command_names_its_prefix() -> None:
    command = replica_command(
        {"model": "/m"},
        replica_id="r",
        key_prefix="p",
        drain_seconds=5,
        program=["python", "-m", "fake"],
    )
    assert command == [
        *("python", "-m", "fake", "--replica-id=r", "--key-prefix=p"),
        *("--drain-timeout=5", "--model=/m"),
    ]


@pytest.mark.django_db
def test_run_does_not_chat_with_a_loaded_model_of_the_same_name_from_elsewhere(
    folder: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DATA_DIR = Path(folder)
    (Path(folder) / INSTANCE_FILE).touch()
    commands: list[str] = []
    monkeypatch.setattr(run, "call_command", lambda name, *args, **kwargs: commands.append(name))
    name = Path(folder).name
    ServedModel.objects.create(name=name, source=folder, desired_state="loaded")
    ServedModel.objects.create(name="Qwen3", source="Qwen/Qwen3", desired_state="loaded")
    for source in (folder, name, "Qwen/Qwen3", "Qwen3"):
        call_command("run", source)
    assert commands == ["chat"] * 4
    with pytest.raises(CommandError, match=r"Qwen3 is loaded from Qwen/Qwen3\. .*--name"):
        call_command("run", "somebody/Qwen3")
    assert commands == ["chat"] * 4
