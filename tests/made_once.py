"""Random checkpoints are made once in a run and copied: many tests have the same tiny models.

To draw, to write and to name the weights of one takes `transformers` twenty milliseconds and more,
to copy it one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

#: Where the run's workers keep what was made; None: everything is made anew.
kept_in: Path | None = None


@pytest.fixture(scope="session", autouse=True)
def checkpoints_are_made_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """In a folder that all workers of a run have."""
    global kept_in
    base = tmp_path_factory.getbasetemp()
    kept_in = (base.parent if hasattr(request.config, "workerinput") else base) / "checkpoints"
    kept_in.mkdir(exist_ok=True)
    yield
    kept_in = None


def copied(what: Any, folder: Path, seed: int, make: Callable[[], object]) -> None:
    """Have `make` write `folder`, unless what says the same of itself was written before.

    torch's generator is left as `seed` begins it, whether something was made or not.
    """
    text = json.dumps([what, seed], sort_keys=True, default=repr)
    if kept_in is None:
        make()
    else:
        kept = kept_in / hashlib.sha256(text.encode()).hexdigest()[:32]
        if kept.is_dir():
            shutil.copytree(kept, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
        else:
            before = {*folder.iterdir()} if folder.is_dir() else set[Path]()
            make()
            if not before:  # else what was there would be taken for a part of it
                _keep(folder, kept)
    torch.manual_seed(seed)


def _keep(folder: Path, kept: Path) -> None:
    """At once, for others may look for it; who comes second has made the same."""
    own = kept.with_name(f"{kept.name}.{os.getpid()}")
    shutil.copytree(folder, own, copy_function=shutil.copyfile)
    try:
        own.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise
        shutil.rmtree(own)


def quicken() -> None:
    """For this process: the survey's checkpoints."""
    from tests.survey import tiny

    plain = tiny.make_checkpoint
    if hasattr(plain, "quick"):
        return

    @functools.wraps(plain)
    def make_checkpoint(recipe: dict[str, Any], folder: Path, seed: int = 0) -> str:
        copied(recipe, folder, seed, lambda: plain(recipe, folder, seed))
        config = json.loads((folder / "config.json").read_text())
        (architecture,) = config["architectures"]
        return str(architecture)

    make_checkpoint.quick = True  # type: ignore[attr-defined]
    tiny.make_checkpoint = make_checkpoint
