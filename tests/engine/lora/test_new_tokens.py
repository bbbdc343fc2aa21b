"""Adapters that bring tokens: rows behind those of the model's tables, as PEFT and vLLM do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from engine import LLM, BeamSearchParams, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.contract.lora import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    NEW_TOKENS_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
)
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.lora.check import check_adapter
from engine.offline.outputs import RequestOutput
from engine.text import adapter_tokenizers

from .adapters import DEMO_MODEL, demo_adapter, write_adapter
from .peft_oracle import PeftOracle, checkpoint, make_adapter
from .test_peft_equality import FEW, generate, serve

VOCAB, NEW = 384, 4
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
TOKENS = list(range(VOCAB, VOCAB + NEW))
#: name -> (tied, tokens more than the model's, PEFT's options).
LAYOUTS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "saved-embedding-layers": (False, NEW, {"target_modules": ["q_proj"]}),
    "modules-to-save": (False, NEW, {"target_modules": ["q_proj"], **BOTH}),
    "matrices-of-both": (False, NEW, {"target_modules": ["embed_tokens", "lm_head"]}),
    "single-rows": (
        False,
        NEW,
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [7, *TOKENS], "lm_head": [9, *TOKENS]},
        },
    ),
    "fewer-tokens": (False, -NEW, {"target_modules": ["q_proj"], **BOTH}),
    "dora": (
        False,
        NEW,
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    ),
    "tied": (True, NEW, {"target_modules": ["q_proj"]}),
    "tied-matrices": (True, NEW, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied-single-rows": (
        True,
        NEW,
        {"target_modules": ["q_proj"], "trainable_token_indices": [7, *TOKENS]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_peft_on_a_resized_model(tmp_path: Path, layout: str) -> None:
    tied, more, options = LAYOUTS[layout]
    model = checkpoint("llama", tmp_path / "model", tie_word_embeddings=tied)
    adapter = make_adapter(model, tmp_path / "adapter", more_tokens=more, **options)
    request = LoRARequest("a", 1, str(adapter))
    beyond = TOKENS if more > 0 else [5, 6]
    pairs = [([5, beyond[0], 17, beyond[1]], "a"), ([5, 9, 17], None), ([8, beyond[1], 3], "a")]
    llm = serve(model)
    isolated_outputs = generate(llm, [(pairs[1][0], None)], FEW)
    asked = [(prompt, None if has_adapter is None else request) for prompt, has_adapter in pairs]
    got = generate(llm, asked, FEW)
    oracle = PeftOracle(model, {"a": adapter}, more_tokens=more)
    expected = oracle.greedy_all(pairs[::2], FEW, got[::2])
    assert got == [expected[0], isolated_outputs[0], expected[1]]
    verdict = check_adapter(str(model), adapter, probe=True)
    assert verdict.error is None


def test_an_output_layer_with_a_bias(tmp_path: Path) -> None:
    model = checkpoint("phi", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", more_tokens=NEW, target_modules=["q_proj"])
    prompt = [5, TOKENS[0], 17, TOKENS[1]]
    expected = PeftOracle(model, {"a": adapter}, more_tokens=NEW).greedy(prompt, FEW, "a")
    request = LoRARequest("a", 1, str(adapter))
    llm = serve(model)
    assert generate(llm, [(prompt, request)], FEW) == [expected]
    tensors = load_file(adapter / WEIGHTS_FILE)
    (bias,) = (name for name in tensors if name.endswith("lm_head.bias"))
    del tensors[bias]
    config = json.loads((adapter / CONFIG_FILE).read_text())
    without = write_adapter(tmp_path / "without", config, tensors)
    with pytest.raises(InvalidRequest, match="brings none for its own tokens"):
        generate(llm, [(prompt, LoRARequest("b", 2, str(without)))], 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single rows, all of them behind the model's."""
    options = {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS},
    }
    folder = tmp_path_factory.mktemp("adapter")
    return make_adapter(model, folder, more_tokens=NEW, **options)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return serve(model)


def as_vllm_has_it(adapter: Path, folder: Path) -> Path:
    """The same adapter with its rows in a file of their own."""
    config = json.loads((adapter / CONFIG_FILE).read_text())
    config["trainable_token_indices"] = None
    tensors = load_file(adapter / WEIGHTS_FILE)
    rows = {name: tensor for name, tensor in tensors.items() if name.endswith("tokens_delta")}
    remaining_tensors = {
        name: tensor for name, tensor in tensors.items() if "token_adapter" not in name
    }
    write_adapter(folder, config, remaining_tensors)
    (output,) = (row for name, row in rows.items() if "lm_head" in name)
    (inputs,) = (row for name, row in rows.items() if "embed_tokens" in name)
    save_file({"input_embeddings": inputs, "output_embeddings": output}, folder / NEW_TOKENS_FILE)
    return folder


def test_rows_in_a_file_of_their_own(model: Path, adapter: Path, llm: LLM, tmp_path: Path) -> None:
    folder = as_vllm_has_it(adapter, tmp_path / "adapter")
    prompt = [5, TOKENS[0], 17, TOKENS[3]]
    expected = PeftOracle(model, {"a": adapter}, more_tokens=NEW).greedy(prompt, FEW, "a")
    initial_ref = LoRARequest("a", 1, str(folder)).ref()
    assert generate(llm, [(prompt, LoRARequest("a", 1, str(folder)))], FEW) == [expected]
    rows = load_file(folder / NEW_TOKENS_FILE)
    save_file({name: row * 2 for name, row in rows.items()}, folder / NEW_TOKENS_FILE)
    assert LoRARequest("a", 1, str(folder)).ref().digest != initial_ref.digest
    save_file({"input_embeddings": rows["input_embeddings"]}, folder / NEW_TOKENS_FILE)
    read_isolated = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={TOKENS[0]: 100})
    (got,) = llm.generate(
        [{"prompt_token_ids": prompt}], read_isolated, lora_request=LoRARequest("a", 1, str(folder))
    )
    assert max(got.outputs[0].token_ids) < VOCAB  # they have no row of the output layer
    assert check_adapter(str(model), folder, probe=True).error is None


def test_matrices_may_leave_out_rows_of_that_file(
    model: Path, adapter: Path, llm: LLM, tmp_path: Path
) -> None:
    options = {"target_modules": ["embed_tokens", "lm_head"], "r": 4}
    baseline_adapter = make_adapter(model, tmp_path / "plain", **options)
    folder = tmp_path / "adapter"
    shutil.copytree(baseline_adapter, folder)
    new = as_vllm_has_it(adapter, tmp_path / "new")
    shutil.copy(new / NEW_TOKENS_FILE, folder)
    request = LoRARequest("a", 1, str(folder))
    bias = SamplingParams(
        temperature=0, max_tokens=FEW, ignore_eos=True, logit_bias=dict.fromkeys(TOKENS, -100)
    )
    prompt = {"prompt_token_ids": [5, 9, 17]}
    (got,) = llm.generate([prompt], bias, use_tqdm=False, lora_request=request)
    oracle = PeftOracle(model, {"a": baseline_adapter})
    assert got.outputs[0].token_ids == oracle.greedy([5, 9, 17], FEW, "a")
    assert check_adapter(str(model), folder, probe=True).error is None


def sampled(llm: LLM, params: SamplingParams, *adapters: LoRARequest | None) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": [5, 9, 17 + row]} for row in range(len(adapters))]
    return llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))


def test_new_tokens_are_chosen_scored_and_penalized(adapter: Path, llm: LLM) -> None:
    request = LoRARequest("a", 1, str(adapter))
    only = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=TOKENS, logprobs=5,
        prompt_logprobs=2,
    )  # fmt: skip
    (got,) = sampled(llm, only, request)
    output = got.outputs[0]
    assert set(output.token_ids) <= set(TOKENS)
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == 3
    full_sampling_params = SamplingParams(max_tokens=1, logprobs=VOCAB + NEW, ignore_eos=True)
    wide = serve_all_logprobs(llm, full_sampling_params, request)
    assert wide.keys() == set(range(VOCAB + NEW))
    total = torch.tensor([entry.logprob for entry in wide.values()]).exp().sum()
    assert total == pytest.approx(1, abs=1e-4)
    best = output.token_ids[0]
    penalized = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=TOKENS,
        presence_penalty=2, frequency_penalty=2,
    )  # fmt: skip
    (other,) = sampled(llm, penalized, request)
    assert other.outputs[0].token_ids[0] == best
    assert set(other.outputs[0].token_ids) == set(TOKENS)  # each is passed over once it came
    bias = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={TOKENS[2]: 100})
    (biased,) = sampled(llm, bias, request)
    assert biased.outputs[0].token_ids == [TOKENS[2]] * 3
    stop = SamplingParams(
        temperature=0, max_tokens=3, logit_bias={TOKENS[2]: 100}, stop_token_ids=[TOKENS[2]]
    )
    (stopped,) = sampled(llm, stop, request)
    assert stopped.outputs[0].finish_reason == "stop"


def serve_all_logprobs(llm: LLM, params: SamplingParams, request: LoRARequest) -> dict[int, Any]:
    """The log probabilities of one token."""
    limit, llm.core.config.max_logprobs = llm.core.config.max_logprobs, VOCAB + NEW
    try:
        (got,) = sampled(llm, params, request)
    finally:
        llm.core.config.max_logprobs = limit
    assert got.outputs[0].logprobs is not None
    return got.outputs[0].logprobs[0]


def test_neighbours_are_the_same_to_the_bit(
    model: Path, adapter: Path, llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], **BOTH}
    baseline = LoRARequest("b", 2, str(make_adapter(model, tmp_path / "b", **options)))
    adapted = LoRARequest("a", 1, str(adapter))
    params = SamplingParams(
        max_tokens=10, ignore_eos=True, logprobs=4, seed=3, temperature=0.8, top_p=0.9,
        repetition_penalty=1.2,
    )  # fmt: skip
    mixed = sampled(llm, params, None, adapted, baseline, adapted)
    assert "failed" not in caplog.text  # no step had to be taken back
    llm.reset_prefix_cache()
    for row, request in enumerate((None, adapted, baseline, adapted)):
        prompt = {"prompt_token_ids": [5, 9, 17 + row]}
        (isolated_output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        assert isolated_output.outputs[0].token_ids == mixed[row].outputs[0].token_ids
        assert isolated_output.outputs[0].logprobs == mixed[row].outputs[0].logprobs


def test_beams_and_drafts_go_through_new_tokens(model: Path, adapter: Path, llm: LLM) -> None:
    request = LoRARequest("a", 1, str(adapter))
    prompt = [5, TOKENS[1], 17, 5, TOKENS[1]]
    prompt_requests = [(prompt, request), (prompt, None)]
    expected = generate(llm, [(prompt, request), ([5, 9], None)], 24)[:1]
    drafting = serve(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert generate(drafting, [(prompt, request)], 24) == expected
    with pytest.raises(InvalidRequest, match="prompt holds token 385"):
        generate(llm, prompt_requests, 2)
    (result,) = llm.beam_search(
        [{"prompt_token_ids": prompt}],
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True),
        lora_request=request,
    )
    assert len(result.sequences) == 2


@pytest.mark.parametrize("loaded", [True, False])
def test_what_goes_beyond_the_adapters_own_vocabulary_is_refused(
    model: Path, adapter: Path, llm: LLM, loaded: bool
) -> None:
    llm = llm if loaded else serve(model)
    request = LoRARequest("a", 1, str(adapter))
    if loaded:
        generate(llm, [([5], request)], 1)
    beyond = VOCAB + NEW
    with pytest.raises(InvalidRequest, match=f"holds token {beyond}.*{beyond} entries") as refused:
        generate(llm, [([5, beyond], request)], 1)
    assert refused.value.param == "prompt"
    for name, params in {
        "allowed_token_ids": SamplingParams(allowed_token_ids=[beyond]),
        "logit_bias": SamplingParams(logit_bias={beyond: 1.0}),
        "structured_outputs": SamplingParams(
            structured_outputs=StructuredOutputsParams(choice=["a"])
        ),  # for want of a tokenizer
    }.items():
        with pytest.raises(InvalidRequest) as refused:
            sampled(llm, params, request)
        assert refused.value.param == name
    assert not llm.core.requests


def test_a_model_that_embeds_reads_new_tokens(tmp_path: Path) -> None:
    model = checkpoint("qwen3", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "a", more_tokens=NEW, target_modules=["q_proj"])
    llm = serve(model, runner="pooling")
    request = LoRARequest("a", 1, str(adapter))
    prompts = [{"prompt_token_ids": [5, token]} for token in (7, *TOKENS)]
    vectors = [result.outputs.embedding for result in llm.embed(prompts, lora_request=request)]
    assert len({tuple(vector) for vector in vectors}) == 1 + NEW
    with pytest.raises(InvalidRequest, match="holds token 388"):
        llm.embed([{"prompt_token_ids": [5, VOCAB + NEW]}], lora_request=request)


def spoiled(adapter: Path, folder: Path, **changes: Any) -> Path:
    """The adapter with other tensors; None: without."""
    tensors = load_file(adapter / WEIGHTS_FILE)
    for name, value in changes.items():
        (full,) = (tensor for tensor in tensors if tensor.endswith(name.replace("__", ".")))
        if value is None:
            del tensors[full]
        else:
            tensors[full] = value
    return write_adapter(folder, json.loads((adapter / CONFIG_FILE).read_text()), tensors)


def test_tables_that_do_not_go_together_are_refused(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    def refusal(folder: Path) -> str:
        verdict = check_adapter(str(model), folder)
        assert verdict.error is not None
        return f"{verdict.error['param']}: {verdict.error['message']}"

    table = torch.zeros(VOCAB + 9, 64)
    other = spoiled(adapter, tmp_path / "1", lm_head__token_adapter__base_layer__weight=table)
    assert "doesn't fit: the embedding has 388 tokens, the output layer 393" in refusal(other)
    few = spoiled(
        adapter, tmp_path / "2", embed_tokens__token_adapter__base_layer__weight=table[:VOCAB]
    )
    assert "has a row of token 387, but the table is for 384" in refusal(few)
    config = json.loads((adapter / CONFIG_FILE).read_text())
    config["trainable_token_indices"] = {"embed_tokens": [VOCAB, *TOKENS[2:], VOCAB + 4]}
    tensors = load_file(adapter / WEIGHTS_FILE)
    remaining_tensors = {
        name: tensor for name, tensor in tensors.items() if not name.endswith("base_layer.weight")
    }
    remaining_tensors = {
        name: tensor for name, tensor in remaining_tensors.items() if "lm_head" not in name
    }
    gaps = write_adapter(tmp_path / "3", config, remaining_tensors)
    assert "trainable_token_indices: " in refusal(gaps)
    classic = as_vllm_has_it(adapter, tmp_path / "4")
    save_file({"input_embeddings": torch.zeros(2, 63)}, classic / NEW_TOKENS_FILE)
    assert "must be [tokens, 64]" in refusal(classic)
    save_file({"embeddings": torch.zeros(2, 64)}, classic / NEW_TOKENS_FILE)
    assert refusal(classic).startswith("embeddings: new_embeddings.safetensors")
    save_file({"input_embeddings": torch.full((2, 64), torch.nan)}, classic / NEW_TOKENS_FILE)
    assert "NaN" in refusal(classic)


# -- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [TOKENIZER_FILE, ADDED_TOKENS_FILE])
def test_prompts_and_texts_are_of_the_adapters_own_tokenizer(tmp_path: Path, form: str) -> None:
    llm = LLM(DEMO_MODEL)
    vocab = llm.core.facts.vocab_size
    folder = demo_adapter(tmp_path / "adapter", 2)
    baseline_ref = LoRARequest("a", 1, str(folder)).ref()
    if form == TOKENIZER_FILE:
        tokenizer = Tokenizer.from_file(str(Path(DEMO_MODEL, TOKENIZER_FILE)))
        size = tokenizer.get_vocab_size()
        tokenizer.add_tokens([f"unused{n}" for n in range(size, vocab)])
        tokenizer.add_tokens([AddedToken("<ahoy>"), AddedToken("<end>", special=True)])
        tokenizer.save(str(folder / TOKENIZER_FILE))
        shutil.copy(Path(DEMO_MODEL, "tokenizer_config.json"), folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("added_tokens_decoder", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<end>"}))
    else:
        (folder / ADDED_TOKENS_FILE).write_text(json.dumps({"<ahoy>": vocab, "<end>": vocab + 1}))
    request = LoRARequest("a", 1, str(folder))
    ref = request.ref()
    assert baseline_ref.tokenizer == ""
    assert len(ref.tokenizer) == 64
    assert ref.digest != baseline_ref.digest  # no cached prefix is shared
    bias = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={vocab: 100})
    got, base = llm.generate(
        ["A <ahoy> ship"] * 2, bias_of(bias, vocab), use_tqdm=False, lora_request=[request, None]
    )
    assert vocab in got.prompt_token_ids
    assert vocab not in base.prompt_token_ids
    assert got.outputs[0].text == "<ahoy>" * 3
    (chat,) = llm.chat(
        [{"role": "user", "content": "Say <ahoy>"}], bias, use_tqdm=False, lora_request=request
    )
    assert chat.outputs[0].text == "<ahoy>" * 3
    assert "Say" in (chat.prompt or "")
    if form == TOKENIZER_FILE:
        ends = SamplingParams(temperature=0, max_tokens=3, logit_bias={vocab + 1: 100})
        (finished_output,) = llm.generate(["A ship"], ends, use_tqdm=False, lora_request=request)
        assert finished_output.outputs[0].finish_reason == "stop"
        assert finished_output.outputs[0].text == ""


def bias_of(first: SamplingParams, vocab: int) -> list[SamplingParams]:
    """For the adapter's row, and for the base's, which lacks the token."""
    return [first, SamplingParams(temperature=0, max_tokens=3)]


def test_a_tokenizer_that_changes_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    llm = LLM(DEMO_MODEL)
    folder = demo_adapter(tmp_path / "adapter", 2)
    vocab = llm.core.facts.vocab_size
    (folder / ADDED_TOKENS_FILE).write_text(json.dumps({"<ahoy>": vocab}))
    initial_ref = LoRARequest("a", 1, str(folder)).ref()
    (folder / ADDED_TOKENS_FILE).write_text(json.dumps({"<yo>": vocab}))
    now = LoRARequest("a", 1, str(folder)).ref()
    assert now.tokenizer != initial_ref.tokenizer
    with pytest.raises(InvalidRequest, match="its tokenizer isn't there any more"):
        llm.llm_engine.tokenizer_of(initial_ref)
    for text, problem in {
        json.dumps({"<yo>": vocab + 5}): "can't be added at",
        json.dumps({"<yo>": "1"}): "must hold ids",
        "[": "isn't valid JSON",
    }.items():
        (folder / ADDED_TOKENS_FILE).write_text(text)
        with pytest.raises(InvalidRequest, match=problem):
            llm.generate("Hello", lora_request=LoRARequest("a", 1, str(folder)))


# -- what a server takes ---------------------------------------------------------------------------


def with_tokenizer(folder: Path, **changes: Any) -> Path:
    """The demo's tokenizer with two tokens more and some parts changed, in an adapter's folder."""
    tokenizer = Tokenizer.from_file(str(Path(DEMO_MODEL, TOKENIZER_FILE)))
    tokenizer.add_tokens([AddedToken("<ahoy>"), AddedToken("<end>", special=True)])
    parts = json.loads(tokenizer.to_str())
    for name, value in changes.items():
        parts[name] = value
    (folder / TOKENIZER_FILE).write_text(json.dumps(parts))
    return folder


def test_a_check_tells_which_tokenizer_is_used(tmp_path: Path) -> None:
    folder = demo_adapter(tmp_path / "adapter", 2)
    vocab = json.loads(Path(DEMO_MODEL, "config.json").read_text())["vocab_size"]
    baseline_adapter = check_adapter(DEMO_MODEL, folder)
    assert (baseline_adapter.ok, baseline_adapter.vocab_size, baseline_adapter.tokenizer) == (
        True,
        vocab + 2,
        "",
    )
    (folder / ADDED_TOKENS_FILE).write_text(json.dumps({"<ahoy>": vocab, "<end>": vocab + 1}))
    added = check_adapter(DEMO_MODEL, folder)
    ref = LoRARequest("a", 1, str(folder)).ref()
    assert (added.ok, added.tokenizer, added.digest) == (True, ref.tokenizer, ref.digest)
    (folder / ADDED_TOKENS_FILE).unlink()
    local_adapter = check_adapter(DEMO_MODEL, with_tokenizer(folder))
    assert (local_adapter.ok, len(local_adapter.tokenizer)) == (True, 64)
    # The model's own, written by another hand, is the model's own.
    same = json.loads(Path(DEMO_MODEL, TOKENIZER_FILE).read_text())
    (folder / TOKENIZER_FILE).write_text(json.dumps(same, indent=3))
    assert check_adapter(DEMO_MODEL, folder).tokenizer == ""
    # Libraries fill in what says nothing, and wrap single steps.
    split, in_bytes = same["pre_tokenizer"]["pretokenizers"]
    inner = {"type": "Sequence", "pretokenizers": [{**in_bytes, "trim_offsets": False}]}
    same["pre_tokenizer"]["pretokenizers"] = [split, inner]
    same["decoder"]["use_regex"] = not same["decoder"]["use_regex"]
    same["normalizer"] = {"type": "Sequence", "normalizers": []}
    same["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    (folder / TOKENIZER_FILE).write_text(json.dumps(same))
    assert check_adapter(DEMO_MODEL, folder).tokenizer == ""
    shutil.copy(Path(DEMO_MODEL, "tokenizer_config.json"), folder)
    assert check_adapter(DEMO_MODEL, folder).tokenizer == ""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert len(check_adapter(DEMO_MODEL, folder).tokenizer) == 64


def test_tokenizers_that_a_server_does_not_take_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_adapter(tmp_path / "adapter", 2)

    def refusal() -> str:
        verdict = check_adapter(DEMO_MODEL, folder)
        assert not verdict.ok
        assert verdict.error is not None
        assert str(tmp_path) not in verdict.error["message"]
        return f"{verdict.error['param']}: {verdict.error['message']}"

    slow = {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated",
            "invert": False}  # fmt: skip
    with_tokenizer(folder, pre_tokenizer=slow)
    assert "tokenizer.json: tokenizer.json isn't the model's" in refusal()
    assert "its pre_tokenizer is another" in refusal()
    spaced = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    with_tokenizer(folder, pre_tokenizer={**spaced, "trim_offsets": False})
    assert "its pre_tokenizer is another" in refusal()
    with_tokenizer(folder, normalizer={"type": "Lowercase"})
    assert "its normalizer is another" in refusal()
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    with_tokenizer(folder, model=words, added_tokens=[])
    assert "its model is another" in refusal()
    for text, problem in (
        ("[", "isn't valid JSON"),
        ("[]", "tokenizer.json"),
        ("{}", "no tokenizer"),
    ):
        (folder / TOKENIZER_FILE).write_text(text)
        assert refusal().startswith("tokenizer.json: ")
        assert problem in refusal()
    with_tokenizer(folder)
    monkeypatch.setattr(adapter_tokenizers, "MAX_ADDED_TOKENS", 1)
    assert "adds 2 tokens; at most 1" in refusal()
    monkeypatch.setattr(adapter_tokenizers, "MAX_TOKENIZER_BYTES", 1000)
    assert refusal().startswith("tokenizer.json: tokenizer.json has ")
    (folder / TOKENIZER_FILE).unlink()
    (folder / ADDED_TOKENS_FILE).write_text(json.dumps({"<yo>": 5000}))
    assert refusal().startswith("added_tokens.json: The token '<yo>' can't be added at 5000")
    (folder / ADDED_TOKENS_FILE).write_text("7")
    assert refusal().startswith("added_tokens.json: added_tokens.json")
