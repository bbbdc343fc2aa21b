"""One running product for all end-to-end tests that don't harm it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.product import Product
from tests.e2e.watched import Watched, watching
from tests.engine.pooling.minilm import minilm_folder


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Quire with the bundled demo model, as `make up` starts it, and all that it tells of itself.

    To start one takes 20 s of a core, so that those who look into it share it with those who ask.
    """
    with watching(tmp_path_factory.mktemp("product")) as watched:
        yield watched


@pytest.fixture(scope="package")
def product(watched: Watched) -> Product:
    """The product alone."""
    return watched.product


@pytest.fixture(scope="package")
def minilm(product: Product) -> str:
    """A real embedding model beside the demo model; what it is, is found out by itself."""
    name = "minilm"
    product.manage("load_model", str(minilm_folder()), "--name", name, "--wait", timeout=180)
    return name


@pytest.fixture
def client(product: Product) -> Iterator[openai.OpenAI]:
    """The real SDK, with no retries that would hide a failure."""
    with openai.OpenAI(
        base_url=product.base_url, api_key=product.api_key, max_retries=0, timeout=60
    ) as client:
        yield client
