"""The product with all that can be seen of it: spans, lines of JSON, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.collector import Collector, collecting
from tests.e2e.product import Product, running

TOKEN = "scrape-me"


@dataclass
class Watched:
    """A product whose spans go to a collector, and its log."""

    product: Product
    collector: Collector
    log: Path

    def metrics(self) -> str:
        """A scrape."""
        reply = httpx.get(
            f"{self.product.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        assert reply.status_code == 200
        return reply.text


@contextmanager
def watching(folder: Path) -> Iterator[Watched]:
    """One that runs as long as the block."""
    environment = {"QUIRE_LOG_STYLE": "json", "QUIRE_METRICS_TOKEN": TOKEN}
    with (
        collecting() as collector,
        running(folder, "--otlp-traces-endpoint", collector.url, **environment) as product,
    ):
        yield Watched(product, collector, folder / "up.log")
