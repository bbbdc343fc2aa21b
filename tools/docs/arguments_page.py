"""docs/arguments.md: vLLM's arguments and variables beside ours."""

from __future__ import annotations

import argparse

from catalog.cli import NAMED
from config.up.server_flags import UNCONFIGURABLE_FLAGS, add_server_flags
from engine.contract.engine_config import SETTINGS
from engine.contract.vllm_flags import VLLM_FLAGS
from tools.docs.vllm_variables import VARIABLES

HEAD = """# vLLM's arguments and variables

Made by `manage.py arguments -o docs/arguments.md`; a test holds it to the code.

`quire serve MODEL` takes vLLM's command line: names with hyphens or underscores, `-tp`, `-pp`,
`-dp`, `-q`, `-O`, dotted names (`--compilation-config.mode 1`), `true` or `false` behind a switch,
`disable-` for `no-enable-`, and `--config FILE`, a YAML file of settings. `manage.py up`,
`load_model` and `engine`, `LLM(...)` and `EngineArgs(...)` take the same engine arguments. An
argument is effective, or changes nothing, or becomes a setting of Quire's, or is refused by a
sentence that says what to do; none is ignored without a word in these tables.

Two things differ on purpose. Quire listens on 127.0.0.1 unless `--host` says otherwise, and it
always wants an API key: the one that it prints, one of `--api-key`, or one made by `manage.py
create_key`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_engine(), *_server(), *_variables()])


def _engine() -> list[str]:
    ours = ",\n".join(f"`{_flag(name)}`" for name in sorted(SETTINGS - NAMED))
    rows = [
        f"| `{_flag(each.name)}` | {each.outcome} | {_sentence(each.note)} |"
        for each in sorted(VLLM_FLAGS, key=lambda each: each.name)
        if each.name not in SETTINGS
    ]
    return [
        "## Engine arguments",
        "",
        "Effective, with vLLM's meaning where vLLM has it: `--model`, `--served-model-name`, "
        f"{ours}.",
        "",
        "| argument | here | |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _server() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_server_flags(parser)
    shown = [
        (action.option_strings[0], "effective", action.help)
        for action in parser._actions
        if action.help != argparse.SUPPRESS
    ]
    hidden = [
        (other.flag, "refused" if other.refuse else "accepted, changes nothing", other.note)
        for other in UNCONFIGURABLE_FLAGS
    ]
    named = [
        ("--host", "effective", "address to listen on"),
        ("--port", "effective", "port to listen on; 0: a free one"),
        ("--ssl-certfile", "effective", "certificate; then HTTPS is served"),
        ("--ssl-keyfile", "effective", "its private key"),
        ("--served-model-name", "effective", "several: other names of the same model"),
    ]
    rows = [
        f"| `{flag}` | {outcome} | {_sentence(note or '')} |"
        for flag, outcome, note in sorted([*named, *shown, *hidden])
    ]
    return ["## The server's arguments", "", "| argument | here | |", "|---|---|---|", *rows, ""]


def _variables() -> list[str]:
    rows = []
    for each in VARIABLES:
        ours = ", ".join(f"`{word}`" for word in each.ours.split(", ") if word)
        rows.append(f"| `{each.name}` | {ours} | {_sentence(each.note)} |")
    return [
        "## Environment variables",
        "",
        "Of Quire's own, [the platform](platform.md#settings) has the list.",
        "",
        "| variable | Quire's | |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _sentence(text: str) -> str:
    """For a cell: without the full stop, and with no bar that would end it."""
    return " ".join(text.split()).removesuffix(".").replace("|", "\\|")
