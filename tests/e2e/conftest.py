"""One running product for all end-to-end tests that don't harm it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.product import Product, running


@pytest.fixture(scope="package")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Quire with the bundled demo model, as `make up` starts it."""
    with running(tmp_path_factory.mktemp("product")) as found:
        yield found


@pytest.fixture
def client(product: Product) -> Iterator[openai.OpenAI]:
    """The real SDK, with no retries that would hide a failure."""
    with openai.OpenAI(
        base_url=product.base_url, api_key=product.api_key, max_retries=0, timeout=60
    ) as found:
        yield found
