"""Perplexity of the demo model by format, as docs/quantization.md has it:
`python -m tests.engine.checkpoints.perplexity_table`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.engine.checkpoints.test_perplexity import FORMATS, in_format
from tests.engine.quantization.perplexity import demo_perplexity, perplexity


def row(name: str) -> str:
    """A format's perplexity beside that of bfloat16, and bytes of its layers."""
    with tempfile.TemporaryDirectory() as folder:
        llm = in_format(name, Path(folder))
        size = sum(report.nbytes for report in llm.load_report() if "_proj" in report.layer)
        moved = 100 * (perplexity(llm) / demo_perplexity() - 1)
    return f"| {name} | {moved:+.2f} % | {size / 1e6:.2f} MB |"


if __name__ == "__main__":
    for name in FORMATS:
        print(row(name), flush=True)
