"""The offline class: what of a prompt is taken, what of an output is shown, and which outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import EngineFault
from engine.offline.outputs import CompletionOutput

EOS = 2
#: Of the tiny tokenizer: special tokens that end nothing.
START, PAD = 1, 3


@pytest.fixture(scope="module")
def llm(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    llm = LLM(str(model_folder("llama")), num_gpu_blocks_override=200, max_model_len=128)
    yield llm
    llm.core.check_integrity()


def forced(*token_ids: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A logits processor that makes the output these tokens."""

    def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(logits, float("-inf"))
        only[token_ids[len(output)]] = 1.0
        return only

    return processor


def say(llm: LLM, *token_ids: int, **fields: Any) -> CompletionOutput:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": len(token_ids), **fields},
        logits_processors=[forced(*token_ids)],
    )
    return llm.generate(["the"], params, use_tqdm=False)[0].outputs[0]


def test_a_logits_processor_has_its_way(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the quick brown fox")
    output = say(llm, *ids)
    assert output.token_ids == ids
    assert output.text == "the quick brown fox"


def test_a_logits_processor_may_see_the_prompt(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def processor(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt), list(output)))
        return logits

    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, logits_processors=[processor]
    )
    (result,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    tokens = result.outputs[0].token_ids
    assert seen == [([5, 6, 7], tokens[:count]) for count in range(3)]


def test_a_logits_processor_that_fails_ends_its_request(llm: LLM) -> None:
    def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    params = SamplingParams(temperature=0, logits_processors=[processor])
    with pytest.raises(EngineFault, match="mine"):
        llm.generate([[5]], params, use_tqdm=False)
    assert not llm.core.requests


def test_special_tokens_in_the_text(llm: LLM) -> None:
    word = llm.get_tokenizer().encode("fox")
    ids = [*word, START, PAD, *word]
    assert say(llm, *ids).text == "foxfox"
    assert say(llm, *ids, skip_special_tokens=False).text == "fox<|im_start|><|pad|>fox"
    close = say(llm, *ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert close.text == "fox<|im_start|><|pad|>fox"
    assert say(llm, *ids, detokenize=False).text == ""


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_tokens_and_eos(llm: LLM, include: bool) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("the quick brown fox")
    by_string = say(llm, *ids, stop=["brown"], include_stop_str_in_output=include)
    assert by_string.text == ("the quick brown" if include else "the quick ")
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", "brown")
    options = {"include_stop_str_in_output": include, "skip_special_tokens": False}
    by_eos = say(llm, *ids, EOS, **options)
    assert by_eos.text == "the quick brown fox" + ("<|im_end|>" if include else "")
    assert (by_eos.finish_reason, by_eos.stop_reason) == ("stop", None)
    assert by_eos.token_ids == [*ids, EOS]
    by_token = say(llm, *ids, stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", ids[-1])


@pytest.mark.parametrize(("limit", "num_tokens"), [(None, 100), (7, 7), (500, 100), (-1, 128 - 30)])
def test_prompts_are_cut_from_the_left(llm: LLM, limit: int | None, num_tokens: int) -> None:
    prompt = [10 + number for number in range(100)]
    tokens = 20 if limit != -1 else 30
    params = SamplingParams(max_tokens=tokens, truncate_prompt_tokens=limit, temperature=0)
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    assert result.prompt_token_ids == prompt[-num_tokens:]


def test_best_of_returns_the_likeliest_as_a_whole_best_first(llm: LLM) -> None:
    sampling: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 9, "logprobs": 0}
    all_of_them = llm.generate([[5, 6]], SamplingParams(n=6, **sampling), use_tqdm=False)[0]
    ranked = sorted(all_of_them.outputs, key=lambda o: -(o.cumulative_logprob or 0.0))
    (best,) = llm.generate([[5, 6]], SamplingParams(n=2, best_of=6, **sampling), use_tqdm=False)
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]


def test_best_of_without_logprobs_shows_none(llm: LLM) -> None:
    params = SamplingParams(n=1, best_of=3, temperature=1.0, max_tokens=4)
    (result,) = llm.generate([[5, 6]], params, use_tqdm=False)
    (output,) = result.outputs
    assert output.logprobs is None
    assert output.cumulative_logprob is not None
