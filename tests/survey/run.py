"""Runs one recipe: the engine's greedy tokens and log probabilities beside `transformers`'."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.contract.errors import ModelLoadError, QuireError
from engine.contract.sampling_params import SamplingParams
from engine.models.decoder import NativeDecoder
from engine.models.registry import decoder_spec
from engine.offline.llm import LLM
from tests.survey.foreign import Foreign, rewrite
from tests.survey.one_result import differing
from tests.survey.published import Published, ReadTensorsOracle
from tests.survey.tiny import Oracle, make_checkpoint, prompts, write_tokenizer

LENGTHS = (1, 50, 17, 64, 33, 90)
OUTPUT = 10
CUT = 24
TOLERANCE = 2e-3

Recipe = dict[str, Any] | Foreign | Published


@dataclass(frozen=True, slots=True)
class Result:
    """How one recipe went.

    Attributes:
        architecture: `transformers`' class.
        runner: "native", "bridge" or "" where nothing ran.
        moved: positions whose logits depend on how they are computed; None: didn't run.
        equal: prompts whose tokens are the oracle's, of len(LENGTHS).
        error: largest difference of a prompt's log probabilities.
        reason: why it couldn't be run, "" when it was.
    """

    architecture: str
    equal: int = 0
    error: float = 0.0
    reason: str = ""
    runner: str = ""
    moved: int | None = None

    @property
    def passed(self) -> bool:
        """All tokens equal and all log probabilities close."""
        return not self.reason and self.equal == len(LENGTHS) and self.error <= TOLERANCE

    @property
    def text(self) -> str:
        """One cell of the table."""
        summary = f"{self.equal}/{len(LENGTHS)} equal, ± {self.error:.0e}"
        if self.passed:
            return f"pass ({summary})"
        return self.reason or f"**fails** ({summary})"

    @property
    def one_result(self) -> str:
        """Likewise, whether bits depend on how a sequence is cut."""
        if self.moved is None:
            return "-"
        return "no" if self.moved else "yes"


def run_recipe(recipe: Recipe, model_impl: str = "auto") -> Result:
    """Make the model, run both, compare. What the engine refuses becomes the reason."""
    with tempfile.TemporaryDirectory() as name:
        architecture, served, make_oracle = make(recipe, Path(name) / "made")
        try:
            llm = _engine(served, model_impl)
        except QuireError as error:
            return Result(architecture, reason=f"refused: {error.message.split(' Known:')[0]}")
        oracle = make_oracle()
        mixed = prompts(LENGTHS)
        expected_tokens = [oracle.greedy(prompt, OUTPUT) for prompt in mixed]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        outputs = llm.generate(mixed, params, use_tqdm=False)
        token_ids = [output.outputs[0].token_ids for output in outputs]
        equal = sum(ours == theirs for ours, theirs in zip(token_ids, expected_tokens, strict=True))
        longest = max(mixed, key=len)
        largest = _largest_error(llm, longest, oracle.logprobs(longest))
        native = isinstance(llm.apply_model(lambda model: model)[0], NativeDecoder)
        runner = "native" if native else "bridge"
        moved = differing(llm, longest, CUT)
        return Result(architecture, equal, largest, runner=runner, moved=moved)


def make(
    recipe: Recipe, folder: Path
) -> tuple[str, Path, Callable[[], Oracle | ReadTensorsOracle]]:
    """Write a recipe's checkpoint: its architecture, the folder to serve, what makes its oracle."""
    if isinstance(recipe, Published):
        recipe.write(folder)
        write_tokenizer(folder)
        return recipe.architecture, folder, lambda: recipe.oracle(folder)
    if isinstance(recipe, Foreign):
        make_checkpoint(recipe.base, folder)
        served = folder.with_name(f"{folder.name}-rewritten")
        rewrite(folder, served, recipe)
        return recipe.architecture, served, lambda: Oracle(folder)
    return make_checkpoint(recipe, folder), folder, lambda: Oracle(folder)


def refusal(architecture: str) -> str:
    """What the engine says to an architecture; "" if it knows it."""
    try:
        decoder_spec({"architectures": [architecture]})
    except ModelLoadError as error:
        return error.message.split(" Known:")[0] if "isn't supported" in error.message else ""
    return ""


def _engine(folder: Path, model_impl: str) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        num_gpu_blocks_override=200,
        max_model_len=256,
        max_num_batched_tokens=48,
        num_threads=1,
        model_impl=model_impl,
    )


def _largest_error(llm: LLM, prompt: list[int], reference: Tensor) -> float:
    """Largest difference between the engine's prompt logprobs and the oracle's."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs or []
    errors = [
        abs(entry[token].logprob - reference[position - 1, token].item())
        for position, (token, entry) in enumerate(zip(prompt, scores, strict=True))
        if entry is not None
    ]
    return max(errors)
