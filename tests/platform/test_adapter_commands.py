"""`manage.py load_adapter`, `list_adapters` and the others; what `up` does about adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from adapters.models import Adapter, AdapterVersion, VersionState
from adapters.sources import check_path
from config.embedded_redis import StartFailed
from config.up.first_run import Module, ensure_adapters, parse_lora_modules, still_checked
from engine.contract.lora import LoRARequest, adapter_digest
from tests.adapter_files import adapter_folder
from tests.hub_cache import cache_files
from tests.platform.adapters import ready, served
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("adapter_store")]


def printed(capsys: Any, *words: str, **options: Any) -> str:
    call_command(*words, **options)
    return str(capsys.readouterr().out)


def test_an_adapters_life_by_commands(world: World, tmp_path: Path, capsys: Any) -> None:
    served()
    folder = adapter_folder(tmp_path / "anywhere" / "tone")
    assert "version 1 is live" in printed(capsys, "load_adapter", str(folder), model="base")
    adapter_folder(folder, seed=2)
    more = {"model": "base", "no_promote": True}
    assert "version 2 is ready" in printed(capsys, "load_adapter", str(folder), **more)
    listed = printed(capsys, "list_adapters").splitlines()
    assert listed[1].split()[:5] == ["base:tone", "everyone", "2", "ready", "-"]
    assert listed[2].split()[:5] == ["base:tone", "everyone", "1", "live", "tone"]
    assert "version 2, 25 %" in printed(capsys, "promote_adapter", "tone", percent=25)
    assert "tone (75 %)" in printed(capsys, "list_adapters")
    assert "version 1 answers all" in printed(capsys, "rollback_adapter", "base:tone")
    assert "is offline" in printed(capsys, "unload_adapter", "tone")
    assert "is deleted" in printed(capsys, "unload_adapter", "tone", delete=True)
    assert not Adapter.objects.exists()


def test_a_copy_is_shown_as_it_goes_on(
    world: World, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served()
    folder = adapter_folder(tmp_path / "anywhere" / "tone")
    call_command("load_adapter", str(folder), model="base", no_wait=True)
    assert "Upload: 100%\n" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    adapter_folder(folder, seed=2)
    call_command("load_adapter", str(folder), model="base", no_wait=True)
    assert f"Upload [{'#' * 30}] 100%\r\x1b[K" in capsys.readouterr().err


def test_commands_name_what_is_missing(world: World, tmp_path: Path) -> None:
    served()
    with pytest.raises(CommandError, match="There is no adapter 'x' shared by all"):
        call_command("promote_adapter", "x")
    with pytest.raises(CommandError, match="Tenant 'nobody' not found"):
        call_command("list_adapters", tenant="nobody")
    with pytest.raises(CommandError, match=r"There is no folder or \.gguf file /"):
        call_command("load_adapter", str(tmp_path / "nothing"), model="base")
    with pytest.raises(CommandError, match="a repository of the hub is owner/name"):
        call_command("load_adapter", "nothing", model="base")
    folder = adapter_folder(tmp_path / "bad", says="refuse")
    with pytest.raises(CommandError, match="is a file: name the folder that holds it"):
        call_command("load_adapter", str(folder / "adapter_config.json"), model="base")
    with pytest.raises(CommandError, match=r"is refused: lora_A holds NaN\."):
        call_command("load_adapter", str(folder), model="base")


def test_a_tenants_adapter_is_asked_for_by_its_tenant(world: World, capsys: Any) -> None:
    ready(world.owner, world.acme, served())
    with pytest.raises(CommandError, match="One of that name is found with --tenant acme"):
        call_command("promote_adapter", "tone")
    assert "version 1" in printed(capsys, "promote_adapter", "tone", tenant="acme")


def test_lora_modules_as_vllm_has_them(world: World, tmp_path: Path) -> None:
    model, folder = served(aliases=["other"]), adapter_folder(tmp_path / "m")
    as_json = json.dumps({"name": "b", "path": str(folder), "base_model_name": "other"})
    assert parse_lora_modules([f"a={folder}", as_json]) == [
        Module("a", str(folder)),
        Module("b", str(folder), "other"),
    ]
    for _ in range(2):  # a second start changes nothing
        ensure_adapters(model, [f"a={folder}", as_json])
    rows = AdapterVersion.objects.values_list("adapter__name", "number", "promote_to")
    assert sorted(rows) == [("a", 1, "a"), ("b", 1, "b")]
    adapter_folder(folder, seed=3)
    ensure_adapters(model, [f"a={folder}"])
    assert AdapterVersion.objects.filter(adapter__name="a").count() == 2


def test_the_start_waits_for_its_modules_and_ends_with_a_refused_one(
    world: World, tmp_path: Path
) -> None:
    folder = adapter_folder(tmp_path / "m")
    versions = ensure_adapters(served(), [f"a={folder}"])
    assert still_checked(versions)
    rows = AdapterVersion.objects.filter(pk=versions[0].pk)
    rows.update(state=VersionState.LIVE)
    assert not still_checked(versions)
    rows.update(state=VersionState.FAILED, report={"error": {"message": "It's too wide."}})
    with pytest.raises(StartFailed, match="--lora-modules a: It's too wide"):
        still_checked(versions)


def test_a_repository_in_the_hubs_cache_is_its_newest_adapter(world: World, tmp_path: Path) -> None:
    """As vLLM's manual names one: `models--owner--name`, links into `blobs` below it."""
    repository = tmp_path / "models--yard1--sql"
    snapshot = cache_files(adapter_folder(tmp_path / "sql"), repository)
    expected, model = adapter_digest(snapshot), served()
    (version,) = ensure_adapters(model, [f"sql={repository}"])
    assert version.digest == expected
    assert LoRARequest("sql", 1, str(repository)).ref().digest == expected
    (repository / "refs" / "main").write_text("../blobs")
    with pytest.raises(CommandError, match=r"no file adapter_config.json"):
        ensure_adapters(model, [f"other={repository}"])


def test_blobs_elsewhere_are_links_as_any_other(world: World, tmp_path: Path) -> None:
    """Or who may write to a folder of adapters could have any file read."""
    repository = tmp_path / "models--yard1--sql"
    snapshot = cache_files(adapter_folder(tmp_path / "sql"), repository)
    (repository / "blobs").rename(tmp_path / "secrets")
    (repository / "blobs").symlink_to(tmp_path / "secrets")
    with pytest.raises(CommandError, match=r"adapter_config.json can't be read"):
        ensure_adapters(served(), [f"sql={snapshot}"])


def test_a_gguf_file_in_the_hubs_cache_is_named_by_its_link(
    world: World, tmp_path: Path, settings: Any
) -> None:
    repository = tmp_path / "models--yard1--sql"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "sql.gguf").write_bytes(b"GGUF")
    file = cache_files(tmp_path / "files", repository) / "sql.gguf"
    model = served()
    (version,) = ensure_adapters(model, [f"sql={file}"])
    assert version.digest == adapter_digest(file)
    settings.QUIRE = settings.QUIRE.replace(adapter_dirs=[repository])
    assert check_path(str(file)) == file
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(CommandError, match=r"sql.gguf can't be read"):
        ensure_adapters(model, [f"other={file}"])


@pytest.mark.parametrize(
    "word", ["tone", "=x", "a=", "{", '{"name": "a"}', "[]", '{"name": 1, "path": 2}', "a=/nowhere"]
)
def test_wrong_modules_are_refused(word: str) -> None:
    with pytest.raises(CommandError, match="--lora-modules"):
        parse_lora_modules([word])


def test_modules_of_another_model_are_refused(world: World, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "m")
    word = json.dumps({"name": "b", "path": str(folder), "base_model_name": "strange"})
    with pytest.raises(CommandError, match="is for strange, but base is served"):
        ensure_adapters(served(), [word])


def test_the_demos_adapters_are_there_once(world: World, settings: Any) -> None:
    model = served(name="demo")
    model.source = str(settings.QUIRE.demo_model)
    model.save()
    ensure_adapters(model, None)
    names = Adapter.objects.values_list("name", "tenant", "description")
    assert [name for name, tenant, words in names if words and tenant is None] == [
        "butler",
        "pirate",
    ]
    Adapter.objects.get(name="pirate").aliases.all().delete()
    Adapter.objects.get(name="pirate").delete()
    ensure_adapters(model, None)
    assert [adapter.name for adapter in Adapter.objects.all()] == ["butler"]
