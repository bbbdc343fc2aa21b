"""The demo model in each format answers as well as in bfloat16; docs/quantization.md has the table.

Weights are rounded to the nearest, so that a format is measured and not a way to calibrate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from tests.engine.checkpoints import writers
from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.packages import bitsandbytes4, compressed, scheme
from tests.engine.checkpoints.writers import Writer
from tests.engine.quantization.perplexity import COUNTS, DEMO, demo_perplexity, perplexity

_W8A8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[dict[str, Any], Writer, float]] = {
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        writers.gptq(group=64), 0.04,
    ),
    "GPTQ, 8 bits with zero points": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64},
        writers.gptq(bits=8, group=64, symmetric=False), 0.005,
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 64}, writers.awq(64), 0.04),
    "W8A8": (
        {**scheme(**_W8A8), "format": "int-quantized"},
        compressed("int-quantized", **_W8A8), 0.01,
    ),
    "FP8": ({"quant_method": "fp8"}, writers.fp8("row"), 0.01),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes4("nf4", True), 0.04,
    ),
    "MXFP4": ({**scheme(**_MXFP4), "format": "mxfp4-pack-quantized"}, writers.dense_mxfp4, 0.06),
}  # fmt: skip
"""Of each its config, how it's written, and how far perplexity may move."""


def in_format(name: str, folder: Path) -> LLM:
    config, write, _ = FORMATS[name]
    pair = make_pair(DEMO, folder, config, lambda weight: write(weight.float()))
    return LLM(str(pair.packed), num_gpu_blocks_override=500)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FORMATS)
def test_perplexity_stays_near_that_of_bfloat16(
    name: str, count: int | None, tmp_path: Path, compiler: None
) -> None:
    llm = in_format(name, tmp_path)
    layers = [report for report in llm.load_report() if "_proj" in report.layer]
    assert {report.level for report in layers} == {"kept"}
    expected = demo_perplexity(count=count)
    assert perplexity(llm, count) == pytest.approx(expected, rel=FORMATS[name][2])
