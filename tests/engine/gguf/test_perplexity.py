"""The demo model in the types that people have on disk answers as well as in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine import LLM
from tests.engine.gguf.files import KindOf, everywhere, write_gguf
from tests.engine.gguf.quantizer import k_quantized, q4_k_m
from tests.engine.quantization.perplexity import COUNTS, DEMO, demo_perplexity, perplexity

DEMO_CONFIG = json.loads((DEMO / "config.json").read_text())
MIXED = q4_k_m(DEMO_CONFIG["num_hidden_layers"], DEMO_CONFIG["tie_word_embeddings"])
FILES: dict[str, tuple[KindOf, float]] = {
    "Q8_0": (everywhere(Kind.Q8_0), 0.005),
    "Q6_K": (everywhere(Kind.Q6_K), 0.005),
    "Q4_K_M": (lambda name: MIXED.get(name, Kind.Q4_K), 0.04),
    "Q4_0": (lambda name: Kind.Q6_K if "token_embd" in name else Kind.Q4_0, 0.04),
}
"""Types by a tensor's name, as llama.cpp deals them out, and how far perplexity may move."""


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FILES)
def test_perplexity_stays_near_that_of_bfloat16(
    name: str, count: int | None, tmp_path: Path
) -> None:
    kind_of, tolerance = FILES[name]
    model = write_gguf(DEMO, tmp_path / f"{name}.gguf", kind_of)
    measured = perplexity(LLM(str(model), num_gpu_blocks_override=500), count)
    assert measured == pytest.approx(demo_perplexity(count=count), rel=tolerance)


@pytest.mark.parametrize(("kind", "tolerance"), [(Kind.Q4_K, 0.08), (Kind.Q6_K, 0.02)])
def test_the_writer_of_these_files_rounds_no_more_than_their_types_do(
    kind: Kind, tolerance: float
) -> None:
    value = np.random.default_rng(5).standard_normal((7, 768), dtype=np.float32)
    value[2, 256:512] = 0
    got = gguf.dequantize(k_quantized(value, kind), kind)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - value) < tolerance * np.linalg.norm(value)
