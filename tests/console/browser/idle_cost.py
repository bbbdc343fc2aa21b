"""What a gateway spends on a page that is open and left alone: CPU time over a minute.

    QUIRE_PASSWORD=... python -m tests.console.browser.idle_cost http://localhost:8000 USER PID

PID is the gateway's process (`python -m config.serve`), whose threads all count. The first line is
without any page. `--seconds 60`, `--pages /console/ /console/kv/`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

from playwright.sync_api import sync_playwright  # noqa: E402

from tests.console.browser.conftest import CHROMIUM, DESKTOP, FLAGS  # noqa: E402
from tests.console.browser.first_paint import log_in  # noqa: E402

#: After which a page has all that it loads.
SETTLED_S = 5.0


def cpu_seconds(pid: int) -> float:
    """Of all of a process's threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spent(pid: int, seconds: float) -> float:
    """Of a core, in percent."""
    initial_cpu_seconds, began = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - initial_cpu_seconds) / (time.monotonic() - began)


def main() -> None:
    """A line for each page: percent of a core, and beyond that of no page."""
    import django

    django.setup()
    from console.navigation import pages

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("user")
    parser.add_argument("pid", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--pages", nargs="+", default=[f"/{p.address}" for p in pages() if p.has_view]
    )
    args = parser.parse_args()
    url = args.url.rstrip("/")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        state = log_in(browser, url, args.user)
        without = spent(args.pid, args.seconds)
        print(f"{'no page':24} {without:5.2f}", flush=True)
        for path in args.pages:
            context = browser.new_context(storage_state=state, viewport=DESKTOP)
            context.new_page().goto(url + path)
            time.sleep(SETTLED_S)
            cpu_ms = spent(args.pid, args.seconds)
            context.close()
            print(f"{path:24} {cpu_ms:5.2f} {cpu_ms - without:+5.2f}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
