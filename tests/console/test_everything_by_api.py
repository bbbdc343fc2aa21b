"""Whatever the console's pages do, the REST APIs do, too: both call the same actions.

Read from the source: which functions of `<app>.actions` are named where.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Pages and, beside them, the REST API.
PAGES = [ROOT / "platform" / name for name in ("console", "accounts", "kv_map")]
REST = ROOT / "platform" / "management_api"
#: What pages alone do, and why.
PAGES_WITHOUT_API = {
    "tenants.actions.get_open_invitation": "whoever has the link, who needn't be known yet",
    "tenants.actions.accept_invitation": "the same",
    "tenants.actions.sign_up_with_invitation": "the same",
    "catalog.actions.check_source": "for a form; `load_model` asks it itself",
    "storage.actions.create_conversation": "the playground's: one person's own, no key's",
    "storage.actions.update_conversation": "the same",
    "storage.actions.rename_conversation": "the same",
    "storage.actions.share_conversation": "the same",
    "storage.actions.delete_conversation": "the same",
    "storage.actions.move_conversation": "the same",
    "storage.actions.save_preset": "the playground's: shown nowhere else",
    "storage.actions.delete_preset": "the same",
    "storage.actions.may_change_preset": "the same",
}


def actions_in(path: Path) -> Iterator[str]:
    """The actions that a file names, as `app.actions.function`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if alias.name == "actions":
                modules[alias.asname or alias.name] = full
            elif node.module.endswith(".actions") and alias.name.islower():
                yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and node.attr.islower():
                yield f"{module}.{node.attr}"


def actions_below(*folders: Path) -> set[str]:
    return {
        name for folder in folders for file in folder.rglob("*.py") for name in actions_in(file)
    }


def test_each_action_of_a_page_is_one_of_the_apis() -> None:
    rest = actions_below(REST, ROOT / "inference")
    pages = actions_below(*PAGES)
    assert len(pages) > 40
    assert pages - rest == set(PAGES_WITHOUT_API)
