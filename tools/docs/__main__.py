"""`python -m tools.docs`: write the generated pages of docs/, or compare them with `--check`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generated_pages() -> dict[str, Callable[[], str]]:
    """Functions that return a page's text, by the page's name in docs/. Django must be set up."""
    from tools.docs import arguments_page, attention_page, cli_page, inventory_page, settings_page

    return {
        "settings.md": settings_page.page,
        "cli.md": cli_page.page,
        "arguments.md": arguments_page.page,
        "inventory.md": inventory_page.inventory,
        "attention-backends.md": attention_page.page,
    }


def main() -> int:
    """Return 1 if `--check` finds a page that differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the pages; write nothing")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT / "platform"))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    import django

    django.setup()
    outdated = []
    for name, page in generated_pages().items():
        path, text = ROOT / "docs" / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated.append(f"docs/{name}")
            if not check:
                path.write_text(text, encoding="utf-8")
    for path_name in outdated:
        print(f"{path_name} is outdated; run `make docs`." if check else f"Wrote {path_name}.")
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
