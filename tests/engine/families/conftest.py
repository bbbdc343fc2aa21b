"""One tiny checkpoint a recipe, and what `transformers` says to it, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engine.greedy import greedy_all
from tests.survey.foreign import FOREIGN
from tests.survey.published import PUBLISHED, ReadTensorsOracle
from tests.survey.recipes import RECIPES
from tests.survey.run import Recipe, make
from tests.survey.tiny import Oracle, prompts

OUTPUT = 6
LENGTHS = (1, 47, 16, 64, 90)


@dataclass(slots=True)
class Case:
    """A checkpoint and the oracle's answers.

    Attributes:
        prompts: mixed lengths; every second one begins with the same 40 tokens.
        oracle: says what comes behind the prompts.
        logprobs: float32 [90, vocab] of the longest prompt.
        guesses: what it's likely to say, which then takes it one pass instead of OUTPUT.
    """

    folder: Path
    prompts: list[list[int]]
    oracle: Oracle | ReadTensorsOracle
    logprobs: torch.Tensor
    guesses: list[list[int]] | None = None
    oracle_tokens: list[list[int]] | None = None

    @property
    def greedy(self) -> list[list[int]]:
        """OUTPUT tokens for each prompt, whatever was guessed."""
        if self.oracle_tokens is None:
            self.oracle_tokens = _greedy(self.oracle, self.prompts, self.guesses)
        return self.oracle_tokens

    @property
    def longest(self) -> list[int]:
        return max(self.prompts, key=len)


NATIVE: dict[str, Recipe] = {**RECIPES, **FOREIGN, **PUBLISHED}


def _greedy(
    oracle: Oracle | ReadTensorsOracle, mixed: list[list[int]], guesses: list[list[int]] | None
) -> list[list[int]]:
    if isinstance(oracle, Oracle):
        return greedy_all(oracle.model, mixed, OUTPUT, guesses)
    return [oracle.greedy(prompt, OUTPUT) for prompt in mixed]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """recipe -> the folder that is served."""
    return lambda name: make(NATIVE[name], tmp_path_factory.mktemp(name))[1]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """recipe -> its case."""
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            folder = tmp_path_factory.mktemp(name)
            _, served, make_oracle = make(NATIVE[name], folder)
            torch.set_num_threads(1)
            oracle, mixed = make_oracle(), prompts(LENGTHS)
            cases[name] = Case(
                folder=served,
                prompts=mixed,
                oracle=oracle,
                logprobs=oracle.logprobs(max(mixed, key=len)),
            )
        return cases[name]

    return get
