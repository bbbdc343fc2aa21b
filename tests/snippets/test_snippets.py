"""Texts about vLLM, followed with `engine` for `vllm`: each snippet works, or ends in a sentence.

The texts aren't in the repository. QUIRE_TEST_MANUAL names their folder; without it, they are
looked for in `shared/seeds` beside the checkout. `PYTHONPATH=.:platform python -m tests.snippets
FILE ...` prints the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.snippets.extract import read_snippets
from tests.snippets.run import Runner
from tests.snippets.world import ROOT, make_environment, make_hub


def _texts() -> list[Path]:
    folders = [Path(os.environ["QUIRE_TEST_MANUAL"])] if "QUIRE_TEST_MANUAL" in os.environ else []
    folders += [parent / "shared" / "seeds" for parent in ROOT.parents]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    return sorted(folder.glob("[0-9]*_*.txt")) if folder else []


TEXTS = _texts()
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(
        not TEXTS, reason="QUIRE_TEST_MANUAL names no folder, and shared/seeds isn't there"
    ),
]
#: The sentences in which snippets may end.
ENDS = (
    # What needs hardware, a package or a network that isn't here.
    r"VLLM_USE_MODELSCOPE is set, but the package isn't installed: pip install modelscope",
    r"FLASH_ATTN can't be used here: device cpu not supported",
    r"device must be one of auto, cpu, cuda; got 'neuron'",
    r"No module named '(ray|awq|auto_fp8|langchain_community|examples\.tensorize_vllm_model)'",
    r"environment variable RANK expected",
    r"Failed to resolve|upload\.wikimedia\.org has no address",
    # A server without TLS is asked by HTTPS.
    r"wrong version number",
    # The folder that another program would have written isn't there.
    r"-FP8(-Dynamic)?/ is no folder here",
    r"there is no file '\./tests/fp8_kv/",
    # The tests' LLaVA names its image token in processor_config.json alone.
    r"^000:5365: .*this model's chat template takes text only",
    # Damaged in print.
    r"KeyError: 'n'|name 'llm' is not defined",
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, short_tmp: Path) -> Iterator[Runner]:
    folder = short_tmp / "world"
    folder.mkdir()
    with make_hub(tmp_path_factory.mktemp("hub")) as hub:
        runner = Runner(folder, make_environment(folder, hub))
        yield runner
        runner.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name[:3])
def test_what_a_text_says_can_be_done(path: Path, runner: Runner) -> None:
    outcomes = [(snippet, runner.run(snippet)) for snippet in read_snippets(path)]
    ends = [
        f"{path.name[:3]}:{snippet.line}: {outcome.detail}"
        for snippet, outcome in outcomes
        if outcome.status == "ends"
    ]
    unexpected = [line for line in ends if not re.search("|".join(ENDS), line)]
    assert not unexpected, "\n".join(unexpected)
