"""`enable_log_requests`: a line for each request, its text only where the tenant allows that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from engine import SamplingParams
from engine.contract.errors import EngineFault
from engine.contract.lora import AdapterRef
from engine.contract.messages import EngineRequest
from engine.core.request_log import log_request
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.test_token_equality import make

PROMPT = "the quick brown fox"


@pytest.mark.parametrize("enabled", [True, False])
def test_logged_requests_show_ids_and_lengths_alone(
    model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    llm = make(model_folder("llama"), enable_log_requests=enabled)
    with caplog.at_level(logging.INFO, logger="engine.core.request_log"):
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=3))
    lines = [line for line in caplog.messages if line.startswith("Received request")]
    expected = (
        f"Received request {output.request_id}: {len(output.prompt_token_ids)} prompt tokens, "
        "max_tokens 3, adapter none."
    )
    assert lines == [expected] * enabled
    assert "quick" not in caplog.text


def test_the_text_of_a_tenant_that_stores_prompts_is_logged_on_one_line_up_to_512_tokens(
    model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(model_folder("llama"))
    ids = tokenizer.encode("the quick\nbrown fox") * 100
    message = EngineRequest(request_id="r", gateway_id="", prompt_token_ids=ids)
    adapter = AdapterRef(digest="0" * 64, name="tone", tokenizer="1" * 64)
    with caplog.at_level(logging.INFO, logger="engine.core.request_log"):
        log_request(message, tokenizer)
        log_request(msgspec.structs.replace(message, log_prompt=True), tokenizer)
        log_request(msgspec.structs.replace(message, log_prompt=True, adapter=adapter), tokenizer)
    silent, with_text, other_tokenizer = caplog.messages
    text = tokenizer.decode(ids[:512], skip_special_tokens=False)
    assert "quick" not in silent
    assert with_text == silent + f" Prompt: {text!r}."
    assert "\n" not in with_text
    assert "quick" not in other_tokenizer


def test_a_prompt_that_cannot_be_decoded_is_refused_before_it_is_queued(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object, **__: object) -> str:
        raise EngineFault("The model's tokenizer can't decode its tokens.")

    core = make(model_folder("llama"), enable_log_requests=True, enable_prompt_embeds=True).core
    monkeypatch.setattr(Tokenizer, "decode", decode)
    message = EngineRequest(request_id="r", gateway_id="", prompt_token_ids=[1, 2], log_prompt=True)
    with pytest.raises(EngineFault):
        core.add_request(message)
    assert not core.requests
    assert not core.has_work
    embeds = torch.zeros(2, core.facts.hidden_size)
    assert core.add_request(message, prompt_embeds=embeds)  # its ids say nothing
