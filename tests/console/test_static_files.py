"""The scripts and styles that are served: nothing from elsewhere, no markup from strings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.staticfiles import finders
from django.test import Client
from django.urls import reverse

import console
from console.static_bundles import BUNDLES, get_bundle, sheet_address

STATIC = Path(console.__file__).parent / "static/console"
SCRIPTS = sorted(STATIC.rglob("*.js"))
TEMPLATES = Path(console.__file__).parents[2] / "templates"
ADDRESS = re.compile(r"""["'(]\s*(?:https?:)?//[a-z0-9]""", re.IGNORECASE)
#: Names that are no addresses to load from.
NAMESPACE = "http://www.w3.org/2000/svg"
DANGEROUS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "createContextualFragment",
    "eval(",
    "new Function",
    "srcdoc",
    "setHTML",
)


def id_of(path: Path) -> str:
    return str(path.relative_to(STATIC))


@pytest.mark.parametrize("script", SCRIPTS, ids=id_of)
def test_fault_37_no_script_makes_markup_from_strings(script: Path) -> None:
    text = script.read_text()
    assert [word for word in DANGEROUS if word in text] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=id_of)
def test_imports_lead_to_files_that_are_there(script: Path) -> None:
    for name in re.findall(r'^(?:import|export) .*?from "(.+?)";$', script.read_text(), re.M):
        assert (script.parent / name).resolve().is_file(), name


def test_nothing_is_loaded_from_other_servers() -> None:
    files = [*STATIC.rglob("*.css"), *SCRIPTS, *TEMPLATES.rglob("*.html")]
    for path in files:
        text = path.read_text().replace(NAMESPACE, "")
        assert ADDRESS.findall(text) == [], path.name


def test_every_icon_that_is_used_is_in_the_sprite() -> None:
    symbols = set(re.findall(r'<symbol id="([a-z]+)"', (STATIC / "icons.svg").read_text()))
    used = set()
    for path in TEMPLATES.rglob("*.html"):
        used |= set(re.findall(r'{% icon "([a-z]+)" %}', path.read_text()))
        used |= set(re.findall(r'}}#([a-z]+)"', path.read_text()))
    for script in SCRIPTS:
        used |= set(re.findall(r'(?:icon|tool)\(\s*"([a-z]+)"', script.read_text()))
    assert used
    assert used <= symbols


def test_the_fonts_come_with_their_licence() -> None:
    licence = (STATIC / "fonts/OFL.txt").read_text()
    for font in STATIC.glob("fonts/*.woff2"):
        assert font.name in licence


@pytest.mark.parametrize("name", BUNDLES)
def test_a_joined_sheet_has_its_files_and_finds_what_they_name(name: str) -> None:
    answer = Client().get(sheet_address(name), headers={"accept-encoding": "identity"})
    text = answer.content.decode()
    assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    for bundle_file in BUNDLES[name]:
        last = Path(str(finders.find(bundle_file))).read_text().strip().splitlines()[-1]
        assert last in text
    for address in re.findall(r"""url\(["']?([^d"')][^"')]*)""", text):
        assert finders.find(address.removeprefix("/static/")), address


def test_an_unknown_sheet_is_404_and_one_of_another_release_is_not_kept() -> None:
    assert Client().get("/styles/nothing-0123456789abcdef.css").status_code == 404
    old = Client().get(reverse("sheet", args=("frame", "0123456789abcdef")))
    assert (old.status_code, old.headers["Cache-Control"]) == (200, "no-cache")
    packed = Client().get(sheet_address("frame"), headers={"accept-encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip"
    assert packed.content == get_bundle("frame").packed
