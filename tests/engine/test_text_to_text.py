"""BART, mBART, Marian, M2M-100 and T5 give `transformers`' tokens, however texts come together."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.lora.check import check_adapter
from tests.engine.lora.peft_oracle import save

NUM_TOKENS = 12
_SIZES = {
    "vocab_size": 90,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 200,
    "decoder_start_token_id": 2,
    "init_std": 0.3,
}
_T5 = {
    "vocab_size": 90,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "initializer_factor": 3.0,
    "relative_attention_max_distance": 20,
    "n_positions": 100,
}
MODELS: dict[str, tuple[type, tf.PreTrainedConfig]] = {
    "bart": (tf.BartForConditionalGeneration, tf.BartConfig(**_SIZES)),
    "mbart": (tf.MBartForConditionalGeneration, tf.MBartConfig(**_SIZES, scale_embedding=True)),
    "marian": (tf.MarianMTModel, tf.MarianConfig(**_SIZES, pad_token_id=89, scale_embedding=True)),
    "m2m100": (
        tf.M2M100ForConditionalGeneration,
        tf.M2M100Config(**_SIZES, pad_token_id=1, scale_embedding=True, activation_function="relu"),
    ),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config(**_T5, num_decoder_layers=3)),
    "flan": (
        tf.T5ForConditionalGeneration,
        # The decoder's context is shorter than a text.
        tf.T5Config(
            **_T5,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            max_position_embeddings=30,
        ),
    ),
}
#: Texts of several lengths, two of them the same.
TEXTS = [[5, 6, 7], list(range(10, 60)), [5, 6, 7], [*range(40, 20, -1), 3], [77]]


@cache
def _built(name: str, root: Path) -> tuple[str, list[list[int]]]:
    """A model's folder, and `transformers`' tokens of `TEXTS`."""
    kind, config = MODELS[name]
    torch.manual_seed(3)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if "norm.weight" in parameter:
                weight.normal_()  # else a token brings itself forth
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.3)
    start = [config.decoder_start_token_id]
    if name == "bart":
        model.generation_config.forced_bos_token_id = 0
        start.append(0)
    model.save_pretrained(root / name)
    return str(root / name), [_greedy(model, text, start, name) for text in TEXTS]


def _greedy(model: Any, text: list[int], start: list[int], name: str) -> list[int]:
    ids = list(start)
    with torch.no_grad():
        states = model.get_encoder()(torch.tensor([text]))
        for _ in range(NUM_TOKENS):
            logits = model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids])).logits
            if name == "marian":  # as its checkpoints' bad_words_ids have it
                logits[..., model.config.pad_token_id] = -torch.inf
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(start) :]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text-to-text")


def _llm(folder: str, **settings: Any) -> LLM:
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        **{"num_gpu_blocks_override": 128, "block_size": 16} | settings,
    )


def _run(llm: LLM, prompts: list[Any], **params: Any) -> list[list[int]]:
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
        | params
    )
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, sampling)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_transformers_together_and_alone(name: str, root: Path) -> None:
    folder, expected = _built(name, root)
    llm = _llm(folder)
    assert len({tuple(tokens) for tokens in expected}) > 2  # the encoder's text decides
    assert _run(llm, TEXTS) == expected
    for text, tokens in zip(TEXTS, expected, strict=True):
        llm.reset_prefix_cache()
        assert _run(llm, [{"encoder_prompt": text, "decoder_prompt": None}]) == [tokens]
    llm.llm_engine.core.check_integrity()


def _count_encodings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of blocks to which texts are encoded from now on."""
    model = llm.llm_engine.core.executor.worker.loaded.model
    encode, counts = model.encode_to_cache, list[int]()

    def counted(tensors: Any, block_ids: list[int], adapter: Any) -> None:
        counts.append(len(block_ids))
        encode(tensors, block_ids, adapter)

    monkeypatch.setattr(model, "encode_to_cache", counted)
    return counts


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_text_is_encoded_once_into_blocks_of_its_length(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = _built(name, root)
    llm = _llm(folder)
    counts = _count_encodings(llm, monkeypatch)
    for _ in range(2):
        assert _run(llm, TEXTS) == expected
    assert counts == [1, 4, 2, 1]
    for salt in ("a", "b", "a"):  # tenants never share states
        prompt = {"prompt_token_ids": TEXTS[0], "cache_salt": salt}
        assert _run(llm, [prompt]) == [expected[0]]
    assert counts == [1, 4, 2, 1, 1, 1]
    # The same beginning of the output hits nothing of another text's.
    started = {"decoder_prompt": list(range(3, 40))}
    first, second = (_run(llm, [started | {"encoder_prompt": text}]) for text in TEXTS[:2])
    assert first != second
    llm.llm_engine.core.check_integrity()


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_chunks_preemption_and_a_full_pool_change_no_token(
    name: str, root: Path, enable_prefix_caching: bool
) -> None:
    folder, expected = _built(name, root)
    llm = _llm(
        folder,
        num_gpu_blocks_override=16,
        max_num_batched_tokens=4,
        enable_prefix_caching=enable_prefix_caching,
    )
    core = llm.llm_engine.core
    step, calls = core.step, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        return core.preempt_all() if calls % 9 == 0 else step()

    core.step = step_with_preemptions  # type: ignore[method-assign]
    assert _run(llm, TEXTS * 2) == expected * 2
    started = [
        {"encoder_prompt": text, "decoder_prompt": tokens[:7]}
        for text, tokens in zip(TEXTS, expected, strict=True)
    ]
    if name == "t5":  # which begins with nothing more than its first token
        assert _run(llm, started, max_tokens=5) == [tokens[7:] for tokens in expected]
    assert core.scheduler.num_preemptions
    core.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"kv_offloading_size": 1},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_texts_together_have_the_tokens_of_each_alone(options: Any, root: Path) -> None:
    llm = _llm(_built("t5", root)[0], **options)
    together = _run(llm, TEXTS * 2)
    assert together[: len(TEXTS)] == together[len(TEXTS) :]
    for text, tokens in zip(TEXTS, together, strict=False):
        llm.reset_prefix_cache()
        assert _run(llm, [text]) == [tokens]
    if not {"quantization", "kv_cache_dtype"} & options.keys():
        assert together[: len(TEXTS)] == _built("t5", root)[1]


@pytest.mark.parametrize(
    ("name", "module"),
    [("bart", "encoder_attn.(q|k|v|out)_proj"), ("t5", "EncDecAttention.[qkvo]")],
)
def test_an_adapter_of_cross_attention_gives_pefts_tokens(
    name: str, module: str, root: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    folder, base = _built(name, root)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=f".*{module}", init_lora_weights=False)
    adapted: Any = get_peft_model(MODELS[name][0].from_pretrained(folder).eval(), config)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.normal_(std=0.4)
    save(adapted, tmp_path)
    model = adapted.base_model.model
    start = [2, 0] if name == "bart" else [0]
    expected = [_greedy(model, text, start, name) for text in TEXTS]
    assert expected != base
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    verdict = check_adapter(str(folder), tmp_path, probe=True)
    assert verdict.ok, verdict.error
    adapter = LoRARequest("a", 1, str(tmp_path))
    results = _llm(folder, enable_lora=True).generate(
        TEXTS * 2, params, lora_request=[None] * len(TEXTS) + [adapter] * len(TEXTS)
    )
    assert [list(result.outputs[0].token_ids) for result in results] == base + expected


def test_a_pool_that_is_too_small_for_the_longest_text_is_named(root: Path) -> None:
    llm = _llm(_built("bart", root)[0], num_gpu_blocks_override=12)
    with pytest.raises(InvalidRequest, match="holds 0 for it beside the 200 that its encoder may"):
        _run(llm, TEXTS[:1])


def test_prompts_have_vllms_forms(root: Path) -> None:
    folder, expected = _built("bart", root)
    llm = _llm(folder)
    text = TEXTS[1]
    forms: list[Any] = [
        text,
        {"prompt_token_ids": text},
        {"encoder_prompt": {"prompt_token_ids": text}, "decoder_prompt": None},
        {"encoder_prompt": text, "decoder_prompt": [0]},
        {"encoder_prompt": text, "decoder_prompt": {"prompt_token_ids": [2, 0]}},
    ]
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for result in llm.generate(forms, params):
        assert result.encoder_prompt_token_ids == text
        assert result.prompt_token_ids == [2, 0]
        assert list(result.outputs[0].token_ids) == expected[1][:1]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "from 1 to 200 tokens; got 0"),
        ([1] * 201, "got 201"),
        ([1, 90], r"in \[0, 90\)"),
        ({"encoder_prompt": [1], "decoder_prompt": [90]}, "90"),
        ({"encoder_prompt": [1], "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"prompt_embeds": torch.zeros(2, 32)}, "prompt_embeds"),
    ],
)
def test_what_is_no_text_for_the_encoder_is_refused(prompt: Any, reason: str, root: Path) -> None:
    llm = _refusing(_built("bart", root)[0])
    with pytest.raises(InvalidRequest, match=reason):
        llm.generate([prompt], SamplingParams(max_tokens=1))


def test_a_limit_of_prompts_never_means_the_beginning_of_an_output(root: Path) -> None:
    llm = _refusing(_built("bart", root)[0])
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        llm.generate(TEXTS[:1], SamplingParams(max_tokens=1, truncate_prompt_tokens=5))


@cache
def _refusing(folder: str) -> LLM:
    return _llm(folder)


def test_beams_are_those_of_transformers(root: Path) -> None:
    folder, _ = _built("t5", root)
    config = MODELS["t5"][1]
    model = tf.T5ForConditionalGeneration.from_pretrained(folder).eval()
    llm = _llm(folder)
    params = SamplingParams(
        use_beam_search=True, n=3, best_of=3, max_tokens=6, ignore_eos=True, temperature=0,
        detokenize=False,
    )  # fmt: skip
    for text, result in zip(TEXTS[:2], llm.generate(TEXTS[:2], params), strict=True):
        beams = [([config.decoder_start_token_id], 0.0)]
        with torch.no_grad():
            states = model.get_encoder()(torch.tensor([text]))
            for _ in range(6):
                grown = []
                for ids, score in beams:
                    logits = model(
                        encoder_outputs=states, decoder_input_ids=torch.tensor([ids])
                    ).logits
                    best = logits[0, -1].log_softmax(-1).topk(3)
                    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                    grown += [([*ids, token], score + value) for value, token in pairs]
                beams = sorted(grown, key=lambda beam: -beam[1])[:3]
        assert [list(output.token_ids) for output in result.outputs] == [b[0][1:] for b in beams]
