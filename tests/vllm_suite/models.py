"""Which model stands in for the one that a test file names."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.product import ROOT
from tests.engine.pooling.models import make

#: Parts of paths, and the head that a tiny random encoder gets for them.
HEADS = (
    ("pooling/classify", "ForSequenceClassification"),
    ("pooling/scoring/test_cross", "ForSequenceClassification"),
    ("pooling/token_classify", "ForTokenClassification"),
    ("pooling/reward", "ForTokenClassification"),
    ("pooling/", "Model"),
    ("serve/middleware/", "Model"),
)


class Models:
    """The demo model, and tiny random encoders where vectors, labels and scores are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, file: str) -> dict[str, str]:
        """What tells a test's server of its model."""
        head = next((head for part, head in HEADS if part in file), None)
        if head is None:
            return {"QUIRE_SUITE_MODEL": str(ROOT / "demo" / "model")}
        labels = 1 if "scoring" in file or "reward" in file else 2
        target = self._folder / f"{head}-{labels}"
        if not target.exists():
            changes = {} if head == "Model" else {"num_labels": labels}
            make("bert", target, head, max_position_embeddings=512, **changes)
        return {"QUIRE_SUITE_MODEL": str(target), "QUIRE_SUITE_POOLING": "1"}
