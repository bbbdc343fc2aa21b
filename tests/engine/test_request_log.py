"""`enable_log_requests`: a line for each request, without its text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import SamplingParams
from tests.engine.test_token_equality import make

PROMPT = "the quick brown fox"


@pytest.mark.parametrize("enabled", [True, False])
def test_logged_requests_show_ids_and_lengths_alone(
    model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    llm = make(model_folder("llama"), enable_log_requests=enabled)
    with caplog.at_level(logging.INFO, logger="engine.core.engine_core"):
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=3))
    lines = [line for line in caplog.messages if line.startswith("Received request")]
    expected = (
        f"Received request {output.request_id}: {len(output.prompt_token_ids)} prompt tokens, "
        "max_tokens 3, adapter none."
    )
    assert lines == [expected] * enabled
    assert "quick" not in caplog.text
