"""Style sheets joined into one file per page, which saves requests on slow connections.

There is no build step: gateways join the files below `static/` in memory. A bundle's URL contains
the digest of its content, so browsers cache it forever.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from urllib.parse import urljoin

from django.contrib.staticfiles import finders
from django.http import Http404, HttpRequest, HttpResponse
from django.templatetags.static import static
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_safe

#: Bundle name -> files to join, in order.
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
        # One bundle each for the admin's forms and lists; our sheet precedes the responsive one.
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
#: Relative URLs in a sheet.
RELATIVE = re.compile(r"""url\((["']?)(\.\./[^)"']+)\1\)""")
#: Imports, which are removed because `BUNDLES` lists the imported sheets first.
IMPORT = re.compile(r"""^@import url\([^)]*\);\n""", re.MULTILINE)
YEAR_S = 31_536_000


@dataclass(frozen=True)
class CssBundle:
    """A bundle's text. `packed`: the text compressed with gzip."""

    text: bytes
    packed: bytes
    digest: str


def get_bundle(name: str) -> CssBundle:
    """Return the bundle of the files' current content. Raises `KeyError` for an unknown name."""
    paths = _paths(name)
    return _joined(name, tuple(path.stat().st_mtime_ns for path in paths))


def sheet_address(name: str) -> str:
    """Return a bundle's URL path."""
    return reverse("sheet", args=(name, get_bundle(name).digest))


@require_safe
def joined_sheet(request: HttpRequest, name: str, digest: str) -> HttpResponse:
    """Serve a bundle. For another release's digest, serve the current content without caching."""
    if name not in BUNDLES:
        raise Http404
    bundle = get_bundle(name)
    packed = "gzip" in request.META.get("HTTP_ACCEPT_ENCODING", "")
    response = HttpResponse(bundle.packed if packed else bundle.text, content_type="text/css")
    if packed:
        response["Content-Encoding"] = "gzip"
    patch_vary_headers(response, ("Accept-Encoding",))
    is_current = digest == bundle.digest
    response["Cache-Control"] = f"public, max-age={YEAR_S}, immutable" if is_current else "no-cache"
    return response


@cache
def _paths(name: str) -> tuple[Path, ...]:
    return tuple(Path(str(finders.find(sheet))) for sheet in BUNDLES[name])


def _absolute_url(sheet: str, match: re.Match[str]) -> str:
    return f'url("{urljoin(static(sheet), match[2])}")'


@lru_cache(maxsize=2 * len(BUNDLES))
def _joined(name: str, mtimes_ns: tuple[int, ...]) -> CssBundle:
    parts = [
        RELATIVE.sub(partial(_absolute_url, sheet), text)
        for sheet, text in zip(
            BUNDLES[name],
            (IMPORT.sub("", path.read_text("utf-8")) for path in _paths(name)),
            strict=True,
        )
    ]
    text = "\n".join(parts).encode()
    return CssBundle(text, gzip.compress(text, 9, mtime=0), hashlib.sha256(text).hexdigest()[:16])
