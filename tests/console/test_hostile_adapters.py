"""Adapters that mean harm, by the API: refused with the field, nothing stays, no neighbour hurt."""

from __future__ import annotations

import io
import json
import stat
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from adapters import actions, store
from adapters import version_jobs as check
from adapters import version_jobs as work
from adapters.models import Adapter, AdapterUpload, AdapterVersion, VersionState
from catalog.models import ServedModel
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.lora.check import check_adapter
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.adapter_files import adapter_bytes
from tests.console.test_rest import Caller, callers
from tests.engine.lora.adapters import DEMO_MODEL, first_a, pirate
from tests.platform.adapters import ready

__all__ = ["callers"]
ROOT = "/api/tenants/acme/adapters/uploads/"
GOOD = adapter_bytes(7)
Files = dict[str, bytes]


@pytest.fixture
def admin(callers: dict[str, Caller], adapter_store: Path) -> Iterator[Caller]:
    """Acme's admin by key, while an adapter of another tenant's is live."""
    rival, quill = Tenant.objects.get(slug="rival"), ServedModel.objects.get(name="quill")
    theirs = ready(SYSTEM_ACTOR, rival, quill, name="theirs", seed=500)
    actions.promote(actor=SYSTEM_ACTOR, version=theirs)

    def state() -> Any:
        theirs.refresh_from_db()
        content = store.content_path(theirs.digest)
        return theirs.state, {path.name: path.read_bytes() for path in content.iterdir()}

    initial_state = state()
    assert initial_state[0] == VersionState.LIVE
    yield callers["admin's key"]
    assert state() == initial_state


def remaining_digests() -> set[str]:
    """What is in the store beside the neighbour's: contents, uploads, half-made folders."""
    existing_digests = set(AdapterVersion.objects.values_list("digest", flat=True))
    names = {path.name for path in store.adapters_dir().iterdir()} - existing_digests - {"uploads"}
    uploads = store.adapters_dir() / "uploads"
    return names | ({path.name for path in uploads.iterdir()} if uploads.is_dir() else set())


def begin(caller: Caller, sizes: dict[str, Any], name: str = "bad") -> Any:
    return caller.ask("POST", ROOT, {"model": "quill", "name": name, "files": sizes})


def upload(caller: Caller, files: Files) -> Any:
    """From its announcement to the answer to `finish`."""
    started_response = begin(caller, {name: len(content) for name, content in files.items()})
    assert started_response.status_code == 201, started_response.content
    prefix = f"{ROOT}{started_response.json()['id']}/"
    for name, content in files.items():
        sent = caller.client.generic(
            "PATCH",
            f"{prefix}files/{name}/",
            content,
            content_type="application/octet-stream",
            headers={**caller.headers, "Upload-Offset": "0"},
        )
        assert sent.status_code == 200, sent.content
    return caller.ask("POST", f"{prefix}finish/")


# -- refused before anything is sent ----------------------------------------------------------

ANNOUNCED: dict[str, tuple[str, Any, str, int]] = {
    "fault-19-name": ("../x", dict.fromkeys(GOOD, 9), "name", 400),
    "absolute": ("/etc/x", dict.fromkeys(GOOD, 9), "name", 400),
    "a-models-name": ("quill", dict.fromkeys(GOOD, 9), "name", 409),
    "colon": ("quill:x", dict.fromkeys(GOOD, 9), "name", 400),
    "path": ("bad", {f"../{CONFIG_FILE}": 9, WEIGHTS_FILE: 9}, "files", 400),
    "folder": ("bad", {f"a/{CONFIG_FILE}": 9, WEIGHTS_FILE: 9}, "files", 400),
    "fault-20-pickle": ("bad", {CONFIG_FILE: 9, "adapter_model.bin": 9}, "files", 400),
    "huge": ("bad", {CONFIG_FILE: 9, WEIGHTS_FILE: 10**15}, "files", 413),
    "negative": ("bad", {CONFIG_FILE: 9, WEIGHTS_FILE: -1}, "files", 400),
}


@pytest.mark.parametrize("kind", ANNOUNCED)
def test_what_is_announced_is_refused_by_its_field(admin: Caller, kind: str) -> None:
    name, sizes, param, status = ANNOUNCED[kind]
    answer = begin(admin, sizes, name)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].partition(".")[0]) == (status, param), error
    if (param, status) == ("name", 400):
        assert "Letters, digits and . _ @ / - inside" in error["message"]
    assert not AdapterUpload.objects.exists()
    assert remaining_digests() == set()


# -- refused when it has come -----------------------------------------------------------------


def header(value: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], begin: int = 0, end: int = 16) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


WEIGHTS: dict[str, bytes] = {
    "pickle": b"\x80\x04" + bytes(60),
    "zipped pickle": b"PK\x03\x04" + bytes(60),
    "header of 2^63": header({"a": tensor([4])}, length=1 << 63),
    "header longer than the file": header({"a": tensor([4])}, length=1 << 20),
    "header no JSON": header(b"{" * 50),
    "deep header": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "offsets behind the end": header({"a": tensor([1 << 20], 0, 1 << 22)}),
    "offsets backwards": header({"a": tensor([4], 16, 0)}),
    "overlapping tensors": header({"a": tensor([4]), "b": tensor([4])}),
    "shape of 2^80": header({"a": tensor([1 << 40, 1 << 40])}),
    "bytes behind": header({"a": tensor([4])}, bytes(99)),
    "cut off": GOOD[WEIGHTS_FILE][:-1],
}
CONFIGS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "files"),
    "deep": (b"[" * 100_000, "files"),
    "deep object": (b'{"a":' * 100_000, "files"),
    "list": (b"[]", "files"),
    "no text": (b"\xff\xfe\x00", "files"),
    "other kind": (b'{"peft_type": "LOHA"}', "peft_type"),
    "rank of 10^9": (b'{"peft_type": "LORA", "r": 1000000000}', "r"),
    "rank no number": (b'{"peft_type": "LORA", "r": "8"}', "r"),
    "rank below zero": (b'{"peft_type": "LORA", "r": -1}', "r"),
}


def archive(member: str, *, link: bool = False) -> bytes:
    info = zipfile.ZipInfo(member)
    info.external_attr = ((stat.S_IFLNK if link else stat.S_IFREG) | 0o777) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        opened.writestr(info, b"/etc/passwd")
    return buffer.getvalue()


ZOO: dict[str, tuple[Files, str]] = {
    **{name: ({**GOOD, WEIGHTS_FILE: content}, "files") for name, content in WEIGHTS.items()},
    **{
        f"config: {name}": ({**GOOD, CONFIG_FILE: content}, param)
        for name, (content, param) in CONFIGS.items()
    },
    "archive that leads out": ({"bad.zip": archive(f"../../{CONFIG_FILE}")}, "files"),
    "archive of a link": ({"bad.zip": archive(CONFIG_FILE, link=True)}, "files"),
    "gguf": ({"bad.gguf": b"\x80\x04" + bytes(60)}, "files"),
}


@pytest.mark.parametrize("kind", ZOO)
def test_what_has_come_is_refused_by_its_field_and_goes(admin: Caller, kind: str) -> None:
    files, param = ZOO[kind]
    answer = upload(admin, files)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_adapter"), (
        error
    )
    assert str(store.adapters_dir()) not in error["message"]
    assert not AdapterUpload.objects.exists()
    assert not Adapter.objects.filter(name="bad").exists()
    assert remaining_digests() == set()


# -- refused by the check, which knows the model ----------------------------------------------


def spoilt(how: str) -> tuple[Files, str]:
    """The demo's pirate with something wrong; the field that is to be named."""
    config, tensors = pirate()
    name = named = first_a(tensors)
    if how == "NaN":
        tensors[name][0, 0] = float("nan")
    elif how == "shape":
        tensors[name] = tensors[name][:, :5].contiguous()
    elif how == "tensor of a huge rank":
        tensors[name] = tensors[name].repeat(512, 1)
    elif how == "path in a tensor's name":
        named = "base_model.model.../../etc/passwd.lora_A.weight"
        tensors[named] = tensors[name].clone()
    else:
        config["auto_mapping"], config["layer_replication"] = {"x": "y"}, [[0, 2]]
        named = "layer_replication"
    return {CONFIG_FILE: json.dumps(config).encode(), WEIGHTS_FILE: save(tensors)}, named


@pytest.mark.parametrize(
    "how", ["NaN", "shape", "tensor of a huge rank", "path in a tensor's name", "setting"]
)
def test_what_the_check_finds_never_answers(
    admin: Caller, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def real(model: str, adapter: Path, **_: Any) -> dict[str, Any]:
        return asdict(check_adapter(DEMO_MODEL, adapter))

    monkeypatch.setattr(check, "run_validation", real)
    files, named = spoilt(how)
    file = upload(admin, files)
    assert file.status_code == 201
    version = AdapterVersion.objects.get(adapter__name="bad")
    work.process_version(version.pk)
    response = admin.get(f"/api/tenants/acme/adapters/{version.adapter_id}/versions/1/")
    assert response["state"] == "failed"
    version.refresh_from_db()
    assert version.report["error"]["param"] == named
    refused = admin.ask(
        "POST", f"/api/tenants/acme/adapters/{version.adapter_id}/promote/", {"version": 1}
    )
    assert refused.status_code == 409
