"""Uploading an adapter in a browser: the files of a folder, a line that breaks, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Route, expect

from tests.adapter_files import adapter_folder
from tests.console.browser.conftest import PHONE, Open
from tests.console.live import ROOT


def test_an_upload_survives_a_broken_line(open_page: Open, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "tone")
    (folder / "README.md").write_text("not wanted")
    page = open_page("/console/adapters/")
    broken: list[Route] = []

    def break_once(route: Route) -> None:
        if broken:
            route.continue_()
        else:
            broken.append(route)
            route.abort()

    page.route("**/files/**", break_once)
    page.locator("#upload-name").fill("tone")
    page.set_input_files("#upload-files", list(folder.iterdir()))
    expect(page.locator("#chosen li")).to_have_count(2)
    page.get_by_role("button", name="Upload").click()
    row = page.get_by_role("row", name="tone")
    expect(row.locator(".state")).to_have_text("checking")
    assert broken


def test_what_is_no_adapter_is_refused_at_once(open_page: Open, tmp_path: Path) -> None:
    pickle = tmp_path / "adapter_model.bin"
    pickle.write_bytes(b"x")
    page = open_page("/console/adapters/", viewport=PHONE)
    page.locator("#upload-name").fill("bad")
    page.set_input_files("#upload-files", [pickle])
    page.get_by_role("button", name="Upload").click()
    status_line = page.locator("#upload-status")
    expect(status_line).to_contain_text("is a pickle")
    expect(status_line).to_have_attribute("data-kind", "error")
    width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0


#: Says the number of a new adapter, and takes the adapter away at the end of what it's told.
_READY = """
import sys
import django
django.setup()
from adapters.models import Adapter
from catalog.models import ServedModel
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.platform.adapters import ready
print(ready(SYSTEM_ACTOR, Tenant.objects.get(slug="acme"), ServedModel.objects.get(name="quill"),
            "answered").adapter_id, flush=True)
sys.stdin.read()
gone = Adapter.objects.get(name="answered")
gone.aliases.all().delete()
gone.delete()
"""


def test_what_a_deed_says_is_read_though_states_change_meanwhile(
    open_page: Open, instance: dict[str, str]
) -> None:
    """The page makes itself anew when states change, but not while an answer is on its way."""
    process = subprocess.Popen(
        [sys.executable, "-c", _READY],
        cwd=ROOT,
        env={**instance, "DJANGO_SETTINGS_MODULE": "config.settings"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        read_what_promoting_says(open_page, int(process.stdout.readline()))
    finally:  # others count the models that are live
        process.communicate(timeout=120)
    assert process.returncode == 0


def read_what_promoting_says(open_page: Open, number: int) -> None:
    page = open_page(f"/console/adapters/{number}/?tenant=acme")
    pending: list[Route] = []

    def hold(route: Route) -> None:
        pending.append(route)

    page.route("**/promote/", hold)
    # States are asked for each second, as when a tab comes to the front, and not each 15.
    front = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(f"setInterval(() => {front}, 1000); 0")
    with page.expect_request("**/promote/"):
        page.get_by_role("button", name="Promote").click(no_wait_after=True)
    changed = {"id": number, "state": "live", "versions": {"1": "live"}, "residency": {}}
    page.route("**/api/adapters*", lambda route: route.fulfill(json={"adapters": [changed]}))
    with page.expect_response("**/api/adapters*"):
        pass
    (sent,) = pending
    sent.continue_()
    expect(page.locator(".notice")).to_contain_text("version 1 is live")


def test_a_folder_is_dropped(open_page: Open, tmp_path: Path) -> None:
    """As from a file manager: what lies in it is chosen, two adapters at a time are not."""
    folders = [adapter_folder(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    (folders[0] / "README.md").write_text("not wanted")
    page = open_page("/console/adapters/")
    drop_zone = page.locator("#drop")
    drop_zone.scroll_into_view_if_needed()
    box = drop_zone.bounding_box()
    assert box is not None
    session = page.context.new_cdp_session(page)

    def drop(*paths: Path) -> None:
        data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            where = {"x": box["x"] + 20, "y": box["y"] + 20}
            session.send("Input.dispatchDragEvent", {"type": kind, **where, "data": data})

    drop(folders[0])
    chosen = page.locator("#chosen li")
    expect(chosen).to_have_count(2)
    assert [text.split(".")[0] for text in sorted(chosen.all_text_contents())] == [
        "adapter_config",
        "adapter_model",
    ]
    drop(*folders)
    expect(page.locator("#upload-status")).to_contain_text("more than one adapter")
    expect(chosen).to_have_count(0)
