"""Quire's commands, which are Django's: `quire help` and `./manage.py help` list them."""

import gc
import os
import sys
from pathlib import Path

from engine.contract.vllm_variables import use_vllm_variables
from engine.version import __version__

PACKAGE = Path(__file__).resolve().parent
#: Folder of the Django apps. A wheel has them inside this package, so that names such as `config`
#: aren't top-level in site-packages. `platform/` of a checkout is a source root, not a package,
#: because `platform` is a module of the standard library.
APPS = next(
    folder for folder in (PACKAGE / "_platform", PACKAGE.parent / "platform") if folder.is_dir()
)
#: Commands that create a data dir, or run a process that needs one on this machine.
MAKERS = (
    "up",
    "serve",
    "migrate",
    "gateway",
    "supervise",
    "engine",
    "worker",
    "run_batch",
    "bench",
    "fetch_adapter",
)
#: Container objects created between two garbage collections. What a command imports stays: with
#: Python's default of 700, scanning it repeatedly takes a tenth of the start-up time.
GC_THRESHOLD = 10_000


def pop_data_dir(arguments: list[str]) -> list[str]:
    """Apply `--data-dir DIR`, which settings need before any command parses its options."""
    rest: list[str] = []
    data_dir: str | None = None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--data-dir":
            rest.append(word)
            continue
        folder = value if equals else next(words, "")
        if not folder or folder.startswith("-"):
            raise SystemExit("--data-dir needs a folder.")
        os.environ["QUIRE_DATA_DIR"] = data_dir = folder
        os.environ["QUIRE_FROM_FLAGS"] = "QUIRE_DATA_DIR"
    if data_dir is not None:
        check_data_dir(data_dir, rest[1:])
    return rest


def check_data_dir(folder: str, words: list[str]) -> None:
    """Reject a missing folder, except for commands that create one: settings would create it."""
    if words and words[0] not in MAKERS and not Path(folder).expanduser().is_dir():
        raise SystemExit(
            f"There is no data dir {folder}: is the name right? "
            f"`{Path(sys.argv[0]).name} up` begins a new one."
        )


def main() -> None:
    """Run one management command with the folder of the apps on the path."""
    gc.set_threshold(GC_THRESHOLD)
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    use_vllm_variables()
    arguments = pop_data_dir(sys.argv)
    try:
        import django
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
    except ImportError as error:
        raise SystemExit(
            f"Django can't be imported ({error}). Quire's own Python has it: `make install` "
            "makes it, `.venv/bin/quire ...` uses it."
        ) from error
    if arguments[1:] in (["--version"], ["version"]):
        print(f"quire {__version__}")
        return
    try:
        is_full = arguments[1:] in (["--help=all"], ["help", "all"])
        if is_full or arguments[1:] in ([], ["help"], ["--help"], ["-h"]):
            django.setup()
            from config.help import overview

            print(overview(full=is_full), flush=True)
            return
        if len(arguments) > 1:
            from config.help import ALIASES

            arguments[1] = ALIASES.get(arguments[1], arguments[1])
        execute_from_command_line(arguments)
    except ImproperlyConfigured as error:
        raise SystemExit(f"Quire's settings: {error}") from error
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; Python would fail at exit otherwise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
