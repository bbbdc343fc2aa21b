"""Tokens that an adapter brings, with grammars, budgets for thinking, logits processors, drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.contract.lora import ADDED_TOKENS_FILE
from engine.contract.reasoning import ReasoningParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.offline.outputs import RequestOutput
from engine.sampling.logits_processor import BatchUpdate, LogitsProcessor
from engine.structured_output import vocabulary as vocabularies
from tests.engine.speculative.eagle_folders import eagle_parts
from tests.engine.speculative.free import make_drafts_free
from tests.engine.speculative.head_folders import mlp_parts, write

from .adapters import DEMO_MODEL, demo_adapter
from .peft_oracle import PeftOracle, checkpoint, make_adapter
from .test_new_tokens import BOTH, NEW, TOKENS, VOCAB
from .test_peft_equality import generate, serve

COUNT = 16
SIZE = json.loads(Path(DEMO_MODEL, "config.json").read_text())["vocab_size"]


# -- grammars -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(DEMO_MODEL, max_num_seqs=8)


def naming(folder: Path, *texts: str, special: str = "") -> LoRARequest:
    """The demo's pirate with a token of each text; `special`: one more."""
    names = [*texts, *([special] if special else [])]
    demo_adapter(folder, len(names))
    ids = {text: SIZE + n for n, text in enumerate(names)}
    (folder / ADDED_TOKENS_FILE).write_text(json.dumps(ids))
    if special:
        tokens_map = json.dumps({"additional_special_tokens": [special]})
        (folder / "special_tokens_map.json").write_text(tokens_map)
    return LoRARequest(folder.name, 1, str(folder))


def under(regex: str, **fields: Any) -> SamplingParams:
    grammar = StructuredOutputsParams(regex=regex)
    return SamplingParams(**{"max_tokens": 24, **fields}, structured_outputs=grammar)


def generate_with(
    llm: LLM, params: SamplingParams | list[SamplingParams], *adapters: LoRARequest | None
) -> list[RequestOutput]:
    prompts = ["The sea is"] * len(adapters)
    return llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))


def test_a_grammar_is_about_the_adapters_own_tokens(demo: LLM, tmp_path: Path) -> None:
    adapter = naming(tmp_path / "a", "[ahoy]", "<yo>", special="<over>")
    logit_bias = dict.fromkeys(range(SIZE, SIZE + 3), 100.0)
    named = StructuredOutputsParams(grammar="start: <yo> /[a-z]{2}/ <over>")
    params = [
        under(r"(\[ahoy\]){3}", temperature=0, logit_bias=logit_bias),
        under("[a-z]{4}", temperature=0, logit_bias=logit_bias),
        under("<over>x|<over><yo>", temperature=0, logit_bias=logit_bias),
        SamplingParams(temperature=0, logit_bias=logit_bias, structured_outputs=named),
    ]
    outputs = [
        result.outputs[0]
        for result in generate_with(demo, params, adapter, adapter, adapter, adapter)
    ]
    assert [completion.finish_reason for completion in outputs] == ["stop"] * 4
    new, baseline_output, special, by_name = outputs
    assert new.token_ids[:3] == [SIZE] * 3
    assert new.text == "[ahoy]" * 3
    assert (baseline_output.text.isalpha(), len(baseline_output.text)) == (True, 4)
    assert max(baseline_output.token_ids) < SIZE
    assert special.text in ("<over>x", "<over><yo>")  # spelled out: markup is no text
    assert max(special.token_ids) < SIZE
    assert (by_name.token_ids[0], by_name.token_ids[-2]) == (SIZE + 1, SIZE + 2)


def test_a_text_that_is_a_models_special_token_is_spelled_out(demo: LLM) -> None:
    """Where a grammar leaves nothing else, too."""
    params = [under(text, temperature=0) for text in ("</tools>", "a</tools>b", "é<[|]im_end[|]>")]
    outputs = [result.outputs[0] for result in generate_with(demo, params, None, None, None)]
    assert [completion.text for completion in outputs] == ["</tools>", "a</tools>b", "é<|im_end|>"]
    assert [completion.finish_reason for completion in outputs] == ["stop"] * 3


def test_rows_under_grammars_of_several_vocabularies_are_the_same_alone(
    demo: LLM, tmp_path: Path
) -> None:
    local, other = (
        naming(tmp_path / "a", "[ahoy]"),
        naming(tmp_path / "b", "[a]", "[b]", "[c]", "[yo]"),
    )
    params = under(r"[ -~]{4,12}|(\[ahoy\])+", seed=5, temperature=1.2, logprobs=3)
    rows = (None, local, other, local)
    together = generate_with(demo, params, *rows)
    demo.reset_prefix_cache()
    for row, adapter in zip(together, rows, strict=True):
        (isolated_output,) = generate_with(demo, params, adapter)
        assert isolated_output.outputs[0].token_ids == row.outputs[0].token_ids
        assert isolated_output.outputs[0].logprobs == row.outputs[0].logprobs


def test_one_grammar_for_two_adapters_is_compiled_for_the_tokens_of_each(
    demo: LLM, tmp_path: Path
) -> None:
    one, two = (
        naming(tmp_path / "one" / "tone", "[one]"),
        naming(tmp_path / "two" / "tone", "[two]"),
    )
    params = under(r"\[one\]|[b-z]{3}", temperature=0, logit_bias={SIZE: 100.0})
    first, second = generate_with(demo, params, one, two)
    assert first.outputs[0].token_ids[0] == SIZE
    assert first.outputs[0].text == "[one]"
    assert SIZE not in second.outputs[0].token_ids
    retained_cache = demo.core.structured.cache
    for number in range(retained_cache.max_vocabularies + 2):
        named = naming(tmp_path / str(number), f"<{number}>")
        generate_with(demo, under("[a-z]", temperature=0), named)
    allocated_vocabularies = {vocabulary for vocabulary, _ in retained_cache._entries}
    assert len(allocated_vocabularies - {b""}) == retained_cache.max_vocabularies


def test_an_output_under_a_grammar_ends_on_the_adapters_own_eos(demo: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    adapter = naming(folder, "<ahoy>", special="<end>")
    settings = json.loads(Path(DEMO_MODEL, "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer.json").write_text(_full_tokenizer("<ahoy>", "<end>"))
    (folder / ADDED_TOKENS_FILE).unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<end>"}))
    bias = {SIZE + 1: 100.0}
    finished_output = generate_with(
        demo, under("[a-z]{2,60}", temperature=0, logit_bias=bias), adapter
    )[0].outputs[0]
    assert finished_output.token_ids[-1] == SIZE + 1
    assert (finished_output.text.isalpha(), finished_output.finish_reason) == (True, "stop")
    free = generate_with(demo, under("[a-z]{2}", temperature=0, ignore_eos=True), adapter)[
        0
    ].outputs[0]
    assert (len(free.text), free.finish_reason) == (2, "stop")


def _full_tokenizer(baseline: str, special: str) -> str:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(DEMO_MODEL, "tokenizer.json")))
    tokenizer.add_tokens([f"unused{n}" for n in range(tokenizer.get_vocab_size(), SIZE)])
    tokenizer.add_tokens([baseline])
    tokenizer.add_special_tokens([AddedToken(special, special=True)])
    return str(tokenizer.to_str())


def test_a_tokenizer_that_is_gone_or_huge_is_told_and_known_again_once_it_is_back(
    demo: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = naming(tmp_path / "a", "[ahoy]")
    params = under(r"\[ahoy\]", temperature=0, logit_bias={SIZE: 100.0})
    request = adapter.ref()
    generate_with(demo, SamplingParams(max_tokens=1), adapter)
    text = (tmp_path / "a" / ADDED_TOKENS_FILE).read_text()
    monkeypatch.setattr(LoRARequest, "ref", lambda self: request)
    (tmp_path / "a" / ADDED_TOKENS_FILE).write_text(text.replace("ahoy", "yo"))
    with pytest.raises(InvalidRequest, match="its tokenizer isn't there any more"):
        generate_with(demo, params, adapter)
    (tmp_path / "a" / ADDED_TOKENS_FILE).write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(vocabularies, "MAX_TEXT_BYTES", 5)
        with pytest.raises(InvalidRequest, match="adds texts of") as refused:
            generate_with(demo, params, adapter)
        assert refused.value.param == "structured_outputs"
    assert generate_with(demo, params, adapter)[0].outputs[0].text == "[ahoy]"


def test_a_budget_for_thinking_is_told_in_new_tokens(demo: LLM, tmp_path: Path) -> None:
    adapter = naming(tmp_path / "a", "<deep>", "</deep>")
    marks = {"start": [SIZE], "end": [[SIZE + 1]], "close": [SIZE + 1]}
    thought = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logit_bias={SIZE: 100.0, SIZE + 1: -100.0},
        thinking=ReasoningParams(**marks, budget=3),
    )  # fmt: skip
    with_form = under("[a-z]{3}", temperature=0, thinking=ReasoningParams(**marks, budget=3))
    free, formed = (
        result.outputs[0] for result in generate_with(demo, [thought, with_form], adapter, adapter)
    )
    assert free.token_ids[0] == SIZE
    assert free.token_ids.index(SIZE + 1) == 4
    after = formed.token_ids.index(SIZE + 1) if SIZE in formed.token_ids else -1
    assert after in (-1, 4)
    assert formed.finish_reason == "stop"
    beyond = ReasoningParams(start=[SIZE + 2], end=[[5]], close=[5], budget=3)
    with pytest.raises(InvalidRequest, match=f"thinking holds token {SIZE + 2}"):
        generate_with(demo, SamplingParams(thinking=beyond), adapter)


# -- logits processors ----------------------------------------------------------------------------


class Widths(LogitsProcessor):
    """Forbids each row's widest token, and tells what it was given."""

    seen: list[tuple[int, int]] = []

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self.rows = batch_update.batch_size

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == self.rows
        Widths.seen.append((len(logits), logits.shape[1]))
        logits[:, -1] = float("-inf")
        return logits


def test_logits_processors_get_whole_rows(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path / "model")
    options: dict[str, Any] = {"target_modules": ["q_proj"], **BOTH}
    request = LoRARequest(
        "a", 1, str(make_adapter(model, tmp_path / "a", more_tokens=NEW, **options))
    )
    llm = serve(model, logits_processors=[Widths])
    bias = {TOKENS[-1]: 100.0, TOKENS[-2]: 90.0}
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias=bias),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={VOCAB - 1: 100.0}),
    ]
    Widths.seen.clear()
    got = llm.generate(
        [{"prompt_token_ids": [5, 9]}] * 2, params, use_tqdm=False, lora_request=[request, None]
    )
    assert got[0].outputs[0].token_ids == [TOKENS[-2]] * 4
    assert VOCAB - 1 not in got[1].outputs[0].token_ids
    assert set(Widths.seen) == {(1, VOCAB + NEW), (1, VOCAB)}


# -- drafts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("model"))


def _draft_of_model(model: Path, folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model)}


def _mlp(model: Path, folder: Path) -> dict[str, Any]:
    return {"method": "mlp_speculator", "model": str(write(folder, *mlp_parts()))}


def _eagle(model: Path, folder: Path) -> dict[str, Any]:
    return {"method": "eagle", "model": str(write(folder, *eagle_parts()))}


@pytest.mark.parametrize("more", [NEW, -NEW])
@pytest.mark.parametrize("method", [_draft_of_model, _mlp, _eagle])
def test_drafts_of_models_and_heads_change_nothing(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: Callable[[Path, Path], dict[str, Any]],
    more: int,
) -> None:
    make_drafts_free(monkeypatch)
    options: dict[str, Any] = {"target_modules": ["q_proj"], **BOTH}
    folder = make_adapter(model, tmp_path / "a", more_tokens=more, **options)
    request = LoRARequest("a", 1, str(folder))
    beyond = TOKENS if more > 0 else [5, 6]
    pairs = [([5, beyond[0], 17, beyond[1]], "a"), ([5, 9, 17], None), ([8, 3, beyond[1]], "a")]
    oracle = PeftOracle(model, {"a": folder}, more_tokens=more)
    drafts = {**method(model, tmp_path / "heads"), "num_speculative_tokens": 3}
    llm = serve(model, speculative_config=drafts)
    asked = [(prompt, None if has_adapter is None else request) for prompt, has_adapter in pairs]
    cold, cached = (generate(llm, asked, COUNT) for _ in range(2))
    expected = oracle.greedy_all(pairs, COUNT, cold)
    assert cold == cached == expected
    drafted = llm.core.stats.spec_decode_num_draft_tokens_total
    assert generate(llm, [asked[0]], COUNT) == expected[:1]
    assert llm.core.stats.spec_decode_num_draft_tokens_total > drafted  # behind new tokens, too
    llm.core.check_integrity()


def test_drafts_never_go_beyond_what_an_adapter_has(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft says a token that the adapter's smaller vocabulary lacks, wherever it is asked."""
    make_drafts_free(monkeypatch)
    options: dict[str, Any] = {"target_modules": ["q_proj"], **BOTH}
    folder = make_adapter(model, tmp_path / "a", more_tokens=-NEW, **options)
    request, few = LoRARequest("a", 1, str(folder)), SamplingParams(max_tokens=9, ignore_eos=True)
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    llm = serve(model, speculative_config=drafts)
    drafter = llm.core.drafter
    assert drafter is not None
    drafted_from: list[list[int]] = []

    def propose(requests: list[tuple[Any, int]]) -> dict[int, list[int]]:
        drafted_from.append([VOCAB - 1])
        return {sequence.seq_id: [7, VOCAB - 1, 7][:count] for sequence, count in requests}

    monkeypatch.setattr(drafter.model, "propose", propose)
    (got,) = llm.generate([{"prompt_token_ids": [5, 9]}], few, use_tqdm=False, lora_request=request)
    assert len(got.outputs[0].token_ids) == 9
    assert drafted_from
    assert max(got.outputs[0].token_ids) < VOCAB - NEW
