"""Style sheets that pages load as one file: a slow line pays for each one that it waits for.

There is no build step: the files below `static/` stay as they are written, and a gateway joins them
in memory. An address has its content's digest, so browsers ask for it once and never again.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import urljoin

from django.contrib.staticfiles import finders
from django.http import Http404, HttpRequest, HttpResponse
from django.templatetags.static import static
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_safe

#: Name: the files that it joins, in their order.
BUNDLES: dict[str, tuple[str, ...]] = {
    name: tuple(f"{path}.css" for path in paths.split())
    for name, paths in {
        "frame": (
            "console/css/tokens console/css/base console/css/frame console/css/controls"
            " console/css/page console/css/components"
        ),
        "playground": (
            "console/css/playground console/css/picker console/css/composer console/css/turns"
            " console/css/prose console/css/panel"
        ),
        "overview": "console/css/prose console/css/overview console/css/charts",
        "reference": "console/css/prose console/css/reference",
        "adapters": "console/css/keys console/css/adapters",
        "audit": "console/css/keys console/css/audit",
        "identity": "console/css/leaf console/css/identity",
        "django-admin": "admin/css/base admin/css/dark_mode",
        "admin": (
            "console/css/tokens console/css/frame console/css/admin_frame console/css/admin"
            " console/css/admin_lists"
        ),
        # The admin's forms and lists have all of theirs in one, ours before those of small screens.
        "admin-form": (
            "admin/css/base admin/css/dark_mode admin/css/widgets admin/css/forms"
            " console/css/tokens console/css/frame console/css/admin_frame console/css/admin"
            " console/css/admin_lists admin/css/responsive"
        ),
        "admin-list": (
            "admin/css/base admin/css/dark_mode admin/css/changelists"
            " console/css/tokens console/css/frame console/css/admin_frame console/css/admin"
            " console/css/admin_lists admin/css/responsive"
        ),
    }.items()
}
#: Addresses in a sheet, relative to it.
RELATIVE = re.compile(r"""url\((["']?)(\.\./[^)"']+)\1\)""")
#: What a sheet imports stands before it in `BUNDLES`: an import would be a trip of its own.
IMPORT = re.compile(r"""^@import url\([^)]*\);\n""", re.MULTILINE)
YEAR_S = 31_536_000


@dataclass(frozen=True)
class CssBundle:
    """Files in one. `packed`: the same, compressed."""

    text: bytes
    packed: bytes
    digest: str


def get_bundle(name: str) -> CssBundle:
    """The sheet as its files are now. Raises `KeyError` for a name that none has."""
    paths = _paths(name)
    return _joined(name, tuple(path.stat().st_mtime_ns for path in paths))


def sheet_address(name: str) -> str:
    """Where browsers find it."""
    return reverse("sheet", args=(name, get_bundle(name).digest))


@require_safe
def joined_sheet(request: HttpRequest, name: str, digest: str) -> HttpResponse:
    """One of `BUNDLES`, to everybody. For another release's digest: what this one has, for now."""
    if name not in BUNDLES:
        raise Http404
    found = get_bundle(name)
    packed = "gzip" in request.META.get("HTTP_ACCEPT_ENCODING", "")
    response = HttpResponse(found.packed if packed else found.text, content_type="text/css")
    if packed:
        response["Content-Encoding"] = "gzip"
    patch_vary_headers(response, ("Accept-Encoding",))
    known = digest == found.digest
    response["Cache-Control"] = f"public, max-age={YEAR_S}, immutable" if known else "no-cache"
    return response


@cache
def _paths(name: str) -> tuple[Path, ...]:
    return tuple(Path(str(finders.find(each))) for each in BUNDLES[name])


@lru_cache(maxsize=2 * len(BUNDLES))
def _joined(name: str, changed: tuple[int, ...]) -> CssBundle:
    parts = [
        RELATIVE.sub(lambda found, at=each: f'url("{urljoin(static(at), found[2])}")', text)
        for each, text in zip(
            BUNDLES[name],
            (IMPORT.sub("", path.read_text("utf-8")) for path in _paths(name)),
            strict=True,
        )
    ]
    text = "\n".join(parts).encode()
    return CssBundle(text, gzip.compress(text, 9, mtime=0), hashlib.sha256(text).hexdigest()[:16])
