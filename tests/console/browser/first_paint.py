"""When pages of a running instance paint for the first time on a slow line.

    QUIRE_PASSWORD=... python -m tests.console.browser.first_paint http://localhost:8000 USER

Chromium emulates 1.6 Mbit/s with 150 ms; each page is visited with an empty cache, three times, and
what it has loaded until the network is quiet is weighed. Paths behind USER: these alone.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

from playwright.sync_api import Browser, sync_playwright  # noqa: E402

from tests.console.browser.conftest import CHROMIUM, DESKTOP, FLAGS  # noqa: E402

LINE = {
    "offline": False,
    "latency": 150,
    "downloadThroughput": 200_000,
    "uploadThroughput": 93_750,
}
PAINTED = """() => new Promise((told) => new PerformanceObserver((seen) => {
  const found = seen.getEntriesByName("first-contentful-paint")[0];
  if (found) told(found.startTime);
}).observe({ type: "paint", buffered: true }))"""
TIMES, QUIET_MS = 3, 1500
#: Lists and forms of Django's admin, of rows that every installation has.
ADMIN = ["/admin/tenants/tenant/", "/admin/tenants/tenant/1/change/"]
ADMIN += ["/admin/tenants/user/1/change/", "/admin/catalog/servedmodel/1/change/"]


def main() -> None:
    """A line for each page: milliseconds (median, most), and kB that it loads."""
    import django

    django.setup()
    from console.navigation import pages

    url, name = sys.argv[1].rstrip("/"), sys.argv[2]
    paths = [f"/{page.address}" for page in pages() if page.has_view] + ADMIN
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        state = log_in(browser, url, name)
        paths = sys.argv[3:] or paths
        for path, cookies in [("/login/", None), *((path, state) for path in paths)]:
            paints = [painted(browser, url + path, cookies) for _ in range(TIMES)]
            times, weight = [paint[0] for paint in paints], max(paint[1] for paint in paints) / 1000
            summary = f"{statistics.median(times):5.0f} {max(times):5.0f} ms {weight:5.0f} kB"
            print(f"{path:40} {summary}", flush=True)
        browser.close()


def log_in(browser: Browser, url: str, name: str) -> Any:
    """The cookies of a person."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}/login/")
    page.get_by_label("Username or email address").fill(name)
    page.get_by_label("Password").fill(os.environ["QUIRE_PASSWORD"])
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{url}/")
    return context.storage_state()


def painted(browser: Browser, address: str, cookies: Any) -> tuple[float, float]:
    """Milliseconds from the start of the visit; bytes that came, headers too."""
    context = browser.new_context(storage_state=cookies, viewport=DESKTOP)
    page = context.new_page()
    devtools = context.new_cdp_session(page)
    devtools.send("Network.enable")
    devtools.send("Network.emulateNetworkConditions", LINE)
    sizes: list[float] = []
    devtools.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(address, wait_until="commit")
    painted_ms: float = page.evaluate(PAINTED)
    page.wait_for_load_state("load")
    page.wait_for_timeout(QUIET_MS)
    context.close()
    return painted_ms, sum(sizes)


if __name__ == "__main__":
    main()
