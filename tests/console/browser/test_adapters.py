"""Uploading an adapter in a browser: the files of a folder, a line that breaks, what is refused."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Route, expect

from tests.adapter_files import adapter_folder
from tests.console.browser.conftest import PHONE, Open


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
    told = page.locator("#upload-told")
    expect(told).to_contain_text("is a pickle")
    expect(told).to_have_attribute("data-kind", "error")
    width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0
