"""Tiny models, made once a session."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.speculative import drafter
from kernels.cpu import CpuKernels, CpuKernelsUnavailable
from tests.engine.models import Oracle, make_model
from tests.engine.speculative.free import make_drafts_free
from tests.engine.speculative.seer import Seer
from tests.engine.wire import WireWorker


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and on a busy machine waiting for them costs much."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def serialized_messages() -> Iterator[None]:
    """A step is data: all engines of these tests send their plans and results through bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.executor.uniproc_executor.Worker", WireWorker)
        yield


@pytest.fixture(scope="session")
def compiler() -> None:
    """Without one there is nothing compiled to test."""
    try:
        CpuKernels()
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider steps are free, whatever this machine measures."""
    make_drafts_free(monkeypatch)


@pytest.fixture
def always_drafts(free_drafts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ngram` gives the drafts of a `Seer`."""
    monkeypatch.setitem(drafter.PROPOSERS, "ngram", Seer)
    Seer.texts, Seer.rng = {}, random.Random(7)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of its random checkpoint."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = make_model(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return get


@pytest.fixture(scope="session")
def oracle(model_folder: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """family -> `transformers` on the same weights."""
    oracles: dict[str, Oracle] = {}

    def get(family: str) -> Oracle:
        if family not in oracles:
            oracles[family] = Oracle(model_folder(family))
        return oracles[family]

    return get
