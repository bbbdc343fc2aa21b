"""A tiny checkpoint a recipe with the oracle's answers, and engines over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.greedy import greedy_all
from tests.survey.bridged import BRIDGED, REFUSED, STATEFUL
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint, prompts

OUTPUT = 6
LENGTHS = (1, 47, 16, 64, 90)
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
ALL = {**RECIPES, **REFUSED, **BRIDGED, **STATEFUL}


@dataclass(slots=True)
class Case:
    """A checkpoint, prompts of mixed lengths, and what the oracle says of each.

    Attributes:
        guesses: what it's likely to say, which then takes it one pass instead of OUTPUT.
    """

    folder: Path
    prompts: list[list[int]]
    oracle: Callable[[list[list[int]]], list[list[int]]]
    guesses: list[list[int]] = field(default_factory=list)
    oracle_tokens: list[list[int]] = field(default_factory=list)

    @property
    def greedy(self) -> list[list[int]]:
        """Greedy tokens, whatever was guessed."""
        self.oracle_tokens = self.oracle_tokens or self.oracle(self.guesses)
        return self.oracle_tokens


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """recipe -> its folder."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("bridged")
            make_checkpoint(ALL[name], folders[name])
        return folders[name]

    return get


@pytest.fixture(scope="session")
def case(checkpoint: Callable[[str], Path]) -> Callable[[str], Case]:
    """recipe -> its case."""
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            torch.set_num_threads(1)
            model, mixed = Oracle(checkpoint(name)).model, prompts(LENGTHS)
            cases[name] = Case(
                checkpoint(name), mixed, functools.partial(greedy_all, model, mixed, OUTPUT)
            )
        return cases[name]

    return get


def make(folder: Path, **settings: Any) -> LLM:
    """An engine that runs the bridge."""
    settings = {"num_gpu_blocks_override": 160, "max_model_len": 256, **settings}
    settings = {"dtype": "float32", "num_threads": 1, "model_impl": "transformers", **settings}
    return LLM(str(folder), **settings)


def tokens(llm: LLM, mixed: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts; the books must balance afterwards."""
    outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
    llm.core.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]
