"""Uploads in pieces, and archives that mean harm."""

from __future__ import annotations

import errno
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from adapters import access, actions, store
from adapters import archive as contents
from adapters import archive as files
from adapters.models import AdapterUpload, VersionState
from catalog.models import ServedModel
from common.errors import (
    AdapterInvalid,
    AdapterTooLarge,
    Conflict,
    NotFound,
    OffsetMismatch,
    PermissionDenied,
    ServiceUnavailable,
)
from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE
from tests.adapter_files import adapter_bytes
from tests.platform.adapters import served
from tests.platform.conftest import World

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("adapter_store"),
]


@pytest.fixture
def model(db: None) -> ServedModel:
    return served()


def start_upload(
    world: World, model: ServedModel, files: dict[str, bytes], **more: Any
) -> AdapterUpload:
    return actions.begin_upload(
        actor=more.pop("actor", world.member),
        tenant=world.acme,
        served_model=model,
        name=more.pop("name", "tone"),
        sizes={name: len(content) for name, content in files.items()},
        **more,
    )


def send(world: World, upload: AdapterUpload, name: str, index: int, *chunks: bytes) -> int:
    return actions.append_chunk(
        actor=world.member, upload=upload, file=name, offset=index, chunks=chunks
    )


def sent(world: World, model: ServedModel, files: dict[str, bytes], **more: Any) -> Any:
    upload = start_upload(world, model, files, **more)
    for name, content in files.items():
        send(world, upload, name, 0, content)
    return actions.finish_upload(actor=world.member, upload=upload)


@pytest.mark.database
def test_an_upload_goes_on_where_it_was_cut_off(world: World, model: ServedModel) -> None:
    files = adapter_bytes()
    upload = start_upload(world, model, files)
    weights = files[WEIGHTS_FILE]

    def dropped() -> Iterator[bytes]:
        yield weights[:50]
        raise ConnectionResetError("the client is gone")

    with pytest.raises(ServiceUnavailable):
        actions.append_chunk(
            actor=world.member, upload=upload, file=WEIGHTS_FILE, offset=0, chunks=dropped()
        )
    assert actions.received_bytes(upload) == {CONFIG_FILE: 0, WEIGHTS_FILE: 50}
    with pytest.raises(OffsetMismatch) as caught:
        send(world, upload, WEIGHTS_FILE, 0, weights)
    assert caught.value.offset == 50
    with pytest.raises(Conflict, match="so far"):
        actions.finish_upload(actor=world.member, upload=upload)
    assert send(world, upload, WEIGHTS_FILE, 50, weights[50:]) == len(weights)
    send(world, upload, CONFIG_FILE, 0, files[CONFIG_FILE])
    version = actions.finish_upload(actor=world.member, upload=upload)
    assert version.state == VersionState.UPLOADED
    assert (store.content_path(version.digest) / WEIGHTS_FILE).read_bytes() == weights
    assert not AdapterUpload.objects.exists()
    assert list((store.adapters_dir() / "uploads").iterdir()) == []
    with pytest.raises(Conflict):
        actions.finish_upload(actor=world.member, upload=upload)


def test_more_than_was_announced_is_refused(world: World, model: ServedModel) -> None:
    files = adapter_bytes()
    upload = start_upload(world, model, files)
    with pytest.raises(AdapterTooLarge):
        send(world, upload, CONFIG_FILE, 0, files[CONFIG_FILE], b"x")
    with pytest.raises(NotFound):
        send(world, upload, "other.safetensors", 0, b"x")


@pytest.mark.database
def test_room_is_kept_while_it_comes(world: World, model: ServedModel, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"adapter_bytes": 400})
    upload = start_upload(world, model, adapter_bytes())
    with pytest.raises(AdapterTooLarge):
        start_upload(world, model, adapter_bytes(1))
    actions.cancel_upload(actor=world.member, upload=upload)
    start_upload(world, model, adapter_bytes(1))
    settings.QUIRE = settings.QUIRE.replace(max_adapter_bytes=100)
    with pytest.raises(AdapterTooLarge):
        start_upload(world, model, adapter_bytes(1))


@pytest.mark.database
def test_forgotten_uploads_go(world: World, model: ServedModel) -> None:
    upload = start_upload(world, model, adapter_bytes())
    send(world, upload, CONFIG_FILE, 0, b"{")
    assert actions.expire_uploads() == 0
    assert actions.expire_uploads(timezone.now() + timedelta(hours=25)) == 1
    assert list((store.adapters_dir() / "uploads").iterdir()) == []


def test_strangers_and_viewers(world: World, model: ServedModel) -> None:
    upload = start_upload(world, model, adapter_bytes())
    for name, refusal in (("outsider", NotFound), ("viewer", PermissionDenied)):
        actor = world.user(name)
        with pytest.raises(refusal):
            start_upload(world, model, adapter_bytes(), actor=actor)
        with pytest.raises(refusal):
            access.access_upload(actor, world.acme, upload.public_id)
        with pytest.raises(refusal):
            actions.append_chunk(
                actor=actor, upload=upload, file=CONFIG_FILE, offset=0, chunks=[b"x"]
            )
        with pytest.raises(refusal):
            actions.finish_upload(actor=actor, upload=upload)
    with pytest.raises(NotFound):
        access.access_upload(world.outsider, world.rival, upload.public_id)


@pytest.mark.parametrize(
    "names",
    [
        (CONFIG_FILE,),
        (CONFIG_FILE, "adapter_model.bin"),
        (CONFIG_FILE, WEIGHTS_FILE, "tokenizer.model"),
        (CONFIG_FILE, WEIGHTS_FILE, "new_embeddings.bin"),
        (CONFIG_FILE, "tokenizer.json"),
        ("../adapter_config.json", WEIGHTS_FILE),
        (CONFIG_FILE, "a\\adapter_model.safetensors"),
        ("a.zip", "b.zip"),
        ("a.tar.gz",),
        ("a\nb.zip",),
        ("\ud800.zip",),
        ("x" * 252 + ".zip",),
        ("é" * 126 + ".gguf",),
        (),
    ],
)
def test_only_an_adapters_files_are_taken(
    world: World, model: ServedModel, names: tuple[str, ...]
) -> None:
    with pytest.raises(AdapterInvalid) as caught:
        start_upload(world, model, dict.fromkeys(names, b"x"))
    assert caught.value.param == "files"
    assert not AdapterUpload.objects.exists()


def test_names_may_be_long_foreign_or_in_capitals(world: World, model: ServedModel) -> None:
    for name in ("Tone.ZIP", "é" * 98 + ".zip", "x" * 196 + ".zip"):
        upload = start_upload(world, model, {name: archive(adapter_bytes())}, name="tone")
        assert actions.received_bytes(upload) == {name: 0}
        send(world, upload, name, 0, archive(adapter_bytes()))
        version = actions.finish_upload(actor=world.member, upload=upload)
        actions.delete_version(actor=world.admin, version=version)
    with pytest.raises(AdapterInvalid, match="isn't a valid GGUF file"):
        sent(world, model, {"TONE.GGUF": b"\x80\x04" + bytes(60)})


@pytest.mark.parametrize("size", [0, -1, True, "7", None, 1.5])
def test_sizes_are_checked(world: World, model: ServedModel, size: Any) -> None:
    with pytest.raises(InvalidRequest):
        actions.begin_upload(
            actor=world.member,
            tenant=world.acme,
            served_model=model,
            name="tone",
            sizes={CONFIG_FILE: 5, WEIGHTS_FILE: size},
        )


# -- archives -----------------------------------------------------------------------------------


def archive(members: dict[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return buffer.getvalue()


def test_an_archive_of_a_folder(world: World, model: ServedModel) -> None:
    inside = {f"tone/{name}": content for name, content in adapter_bytes().items()}
    packed = archive({**inside, "tone/README.md": b"hello"}, zipfile.ZIP_DEFLATED)
    version = sent(world, model, {"tone.zip": packed})
    retained_names = {path.name for path in store.content_path(version.digest).iterdir()}
    assert retained_names == {CONFIG_FILE, WEIGHTS_FILE}


def test_a_tokenizer_is_part_of_what_an_adapter_is(world: World, model: ServedModel) -> None:
    """Equal weights with other tokens are another adapter, however they came."""
    tokens = {"added_tokens.json": b'{"<ahoy>": 9}', "special_tokens_map.json": b"{}"}
    with_added_token = {**tokens, "added_tokens.json": b'{"<yo>": 9}'}
    baseline = sent(world, model, adapter_bytes(), name="plain")
    with_tokens = sent(world, model, {**adapter_bytes(), **tokens}, name="own")
    other = sent(world, model, {**adapter_bytes(), **with_added_token}, name="other")
    assert len({baseline.digest, with_tokens.digest, other.digest}) == 3
    paths = {store.content_path(version.digest) for version in (baseline, with_tokens, other)}
    assert len(paths) == 3
    again = {f"run/{name}": content for name, content in {**adapter_bytes(), **tokens}.items()}
    again |= {"run/checkpoint/tokenizer.json": b"{}", "run/optimizer.txt": b""}
    packed = sent(world, model, {"run.zip": archive(again)}, name="packed")
    assert packed.digest == with_tokens.digest
    with pytest.raises(Conflict, match="exactly this content"):
        sent(world, model, {**adapter_bytes(), **tokens}, name="own")
    # Settings without a tokenizer say nothing, so they make no other adapter.
    same = {**adapter_bytes(), "tokenizer_config.json": b"{}"}
    assert sent(world, model, same, name="same").digest == baseline.digest
    assert {path.name for path in store.content_path(baseline.digest).iterdir()} == {
        CONFIG_FILE,
        WEIGHTS_FILE,
    }


@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json"])
def test_a_tokenizer_has_a_limit_of_its_own(
    world: World, model: ServedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(contents, "MAX_TOKENIZER_BYTES", 30)
    monkeypatch.setattr(contents, "MAX_BESIDE_BYTES", 20)
    tokens = {"tokenizer.json": b"{" + b" " * 20, "added_tokens.json": b"{}"}
    assert sent(world, model, {**adapter_bytes(), **tokens}).digest
    large = tokens | {name: b"{" + b" " * 40}
    with pytest.raises(AdapterTooLarge, match=f"{name} has more than") as caught:
        sent(world, model, {**adapter_bytes(1), **large})
    assert caught.value.param == "files"


def link() -> zipfile.ZipInfo:
    zip_info = zipfile.ZipInfo(CONFIG_FILE)
    zip_info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zip_info


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"../../adapter_config.json": b"{}"}, "points outside the archive"),
        ({"/etc/adapter_config.json": b"{}"}, "points outside the archive"),
        ({"a\\..\\b": b"{}"}, "points outside the archive"),
        ({link(): b"/etc/passwd"}, "is a link"),
        ({"training_args.bin": b"x"}, "is a pickle"),
        ({"new_embeddings.bin": b"x"}, "is a pickle"),
        ({"new_embeddings.gguf": b"x"}, "can't be read: of new tokens only"),
        ({**adapter_bytes(), "new_embeddings.safetensors": b"PK"}, "new_embeddings.*pickle"),
        ({**adapter_bytes(), "new_embeddings.safetensors": b"x"}, "new_embeddings.*no safetensors"),
        ({"a/adapter_config.json": b"{}", "b/adapter_config.json": b"{}"}, "more than one"),
        ({f"{n}": b"" for n in range(1001)}, "1001 members"),
        ({"README.md": b""}, "no file adapter_config.json"),
    ],
)
def test_archives_that_mean_harm(
    world: World, model: ServedModel, members: Any, text: str, tmp_path: Path
) -> None:
    initial = set(tmp_path.rglob("*"))
    with pytest.raises(AdapterInvalid, match=text):
        sent(world, model, {"tone.zip": archive(members)})
    remaining_names = {path.name for path in set(tmp_path.rglob("*")) - initial}
    assert not {CONFIG_FILE, "passwd"} & remaining_names


def test_a_bomb_is_put_out(world: World, model: ServedModel, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_adapter_bytes=1 << 20)
    packed = archive({WEIGHTS_FILE: b"\0" * (64 << 20)}, zipfile.ZIP_DEFLATED)
    assert len(packed) < 1 << 20
    with pytest.raises(AdapterTooLarge):
        sent(world, model, {"bomb.zip": packed})
    written = sum(path.stat().st_size for path in store.adapters_dir().rglob("*.safetensors"))
    assert written <= 2 << 20


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"no archive", b"PK\x03\x04" + b"\0" * 99])
def test_damaged_archives(world: World, model: ServedModel, content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        sent(world, model, {"tone.zip": content})


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_bytes_damaged_on_the_way_are_the_archives_fault(
    world: World, model: ServedModel, method: int
) -> None:
    """Whatever unpacks them has errors of its own, and the upload is given up."""
    settings = 30 + len(CONFIG_FILE)
    packed = bytearray(archive(adapter_bytes(), method))
    for index in range(settings, settings + 30):
        packed[index] ^= 0xFF
    with pytest.raises(AdapterInvalid, match="archive") as caught:
        sent(world, model, {"tone.zip": bytes(packed)})
    assert caught.value.param == "files"
    assert not AdapterUpload.objects.exists()


def test_a_disk_that_is_full_is_no_damage(
    world: World, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "copy_bounded", full)
    with pytest.raises(ServiceUnavailable, match="No space left"):
        sent(world, model, {"tone.zip": archive(adapter_bytes())})
    assert AdapterUpload.objects.exists(), "it can be finished once there is room"
