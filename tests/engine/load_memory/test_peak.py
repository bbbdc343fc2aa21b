"""A load needs little more memory than what it leaves behind, whatever it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.engine.load_memory.checkpoints import (
    QUANTIZED,
    write_checkpoint,
    write_gguf_file,
    write_quantized,
)

ROOT = Path(__file__).parents[3]
SAFETENSORS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "shards": {"dtype": "bfloat16", "shards": 5},
    "tied": {"dtype": "bfloat16", "tied": True},
}
GGUF = {
    "F16": (Kind.F16,), "Q8_0": (Kind.Q8_0,), "Q4_0": (Kind.Q4_0,),
    "Q4_K_M": (Kind.Q4_K, Kind.Q6_K), "Q5_K": (Kind.Q5_K,),
}  # fmt: skip
#: Kept, widened, narrowed and rounded once, and whatever has a reader of its own.
LOADS = [
    ("shards", "auto"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "int4"),
    ("shards", "int8"), ("tied", "float32"), ("Q4_K_M", "auto"), ("F16", "float32"),
    ("Q8_0", "int4"), *((name, "auto") for name in QUANTIZED), ("fp8", "int8"),
]  # fmt: skip
#: The same from other kinds of file.
MORE = [
    ("bfloat16", "auto"), ("bfloat16", "int8"), ("float16", "bfloat16"), ("float32", "auto"),
    ("tied", "int4"), *((name, "auto") for name in GGUF if name != "Q4_K_M"),
]  # fmt: skip
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


Sizes = dict[str, int]


class Measured:
    """Bytes of each of the loads."""

    def __init__(self, folder: Path) -> None:
        models = {name: write_checkpoint(folder / name, **how) for name, how in SAFETENSORS.items()}
        models |= {n: write_gguf_file(folder / f"{n}.gguf", *how) for n, how in GGUF.items()}
        models |= {name: write_quantized(folder / name, name) for name in QUANTIZED}
        self._models = models
        self._measured: dict[tuple[str, str], Sizes] = {}

    def of(self, load: tuple[str, str]) -> Sizes:
        """As it was measured; once more where that is too much, for a machine with other work
        lets go of a file's pages late.
        """
        if load not in self._measured:
            together = LOADS if load in LOADS else MORE
            self._measured |= zip(together, self._measure(together), strict=True)
        if not fits(self._measured[load]):
            (self._measured[load],) = self._measure([load])
        return self._measured[load]

    def _measure(self, loads: list[tuple[str, str]]) -> list[Sizes]:
        named = [part for model, weights in loads for part in (str(self._models[model]), weights)]
        command = [sys.executable, "-m", "tests.engine.load_memory.measure", *named]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Many of them in one go."""
    return Measured(tmp_path_factory.mktemp("checkpoints"))


def fits(sizes: Sizes) -> bool:
    """Whether a load took little more than its weights."""
    # The interpreter itself comes and goes by a few megabytes.
    return sizes["peak"] < 1.15 * sizes["weights"] + (6 << 20)


@pytest.mark.system
@pytest.mark.parametrize(
    "load",
    [*LOADS, *(pytest.param(load, marks=pytest.mark.slow) for load in MORE)],
    ids=lambda load: f"{load[0]}-as-{load[1]}",
)
def test_a_load_needs_little_more_memory_than_its_weights(
    load: tuple[str, str], measured: Measured
) -> None:
    assert fits(measured.of(load)), measured.of(load)
