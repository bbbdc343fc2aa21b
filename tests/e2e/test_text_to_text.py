"""T5 and NLLB in a running product: `/v1/completions` says what the engine says of a text."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest
import torch
import transformers as tf

from engine import LLM, SamplingParams
from tests.e2e.product import product_pids, running
from tests.inference.tokenizer_folder import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("text_to_text")]

TEXTS = ["translate: the quick brown fox", "hello world, one two three", "summarize: words " * 9]


def test_completions_are_what_the_encoders_text_gives_and_survive_a_killed_engine(
    tmp_path: Path,
) -> None:
    folder = write_tokenizer(tmp_path / "model")
    torch.manual_seed(3)
    config = tf.T5Config(
        vocab_size=512,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=4.0,
        feed_forward_proj="gated-gelu",
    )
    tf.T5ForConditionalGeneration(config).save_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    results = llm.generate(TEXTS, params)
    texts = [result.outputs[0].text for result in results]
    assert len(set(texts)) == len(texts)
    flags = ("--model", str(folder), "--served-model-name", "t5", "--dtype", "float32")
    with running(tmp_path, *flags) as product:
        client = openai.OpenAI(base_url=product.base_url, api_key=product.api_key, max_retries=0)
        options = {"model": "t5", "max_tokens": 200, "temperature": 0}
        more = {"ignore_eos": True}
        answer = client.completions.create(prompt=TEXTS, extra_body=more, **options)
        assert [choice.text for choice in answer.choices] == texts
        read = sum(len(result.encoder_prompt_token_ids or ()) for result in results)
        assert answer.usage.prompt_tokens == read + len(TEXTS)
        stream = client.completions.create(prompt=TEXTS[0], extra_body=more, stream=True, **options)
        output = ""
        for number, chunk in enumerate(stream):
            output += chunk.choices[0].text if chunk.choices else ""
            if number == 3:
                [engine] = product_pids(product, "engine.serving")
                os.kill(engine, signal.SIGKILL)
        assert output == texts[0]


def test_a_translations_language_is_the_requests(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    torch.manual_seed(3)
    config = tf.M2M100Config(
        vocab_size=512, d_model=32, encoder_layers=2, decoder_layers=2, init_std=0.5,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=1, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    tf.M2M100ForConditionalGeneration(config).save_pretrained(folder)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    languages = (7, 9)
    prompts = [
        {"encoder_prompt": TEXTS[1], "decoder_prompt": {"prompt_token_ids": [2, language]}}
        for language in languages
    ]
    texts = [result.outputs[0].text for result in llm.generate(prompts, params)]
    assert texts[0] != texts[1]
    flags = ("--model", str(folder), "--served-model-name", "nllb", "--dtype", "float32")
    with running(tmp_path, *flags) as product:
        client = openai.OpenAI(base_url=product.base_url, api_key=product.api_key, max_retries=0)
        for language, text in zip(languages, texts, strict=True):
            answer = client.completions.create(
                model="nllb",
                prompt=TEXTS[1],
                max_tokens=12,
                temperature=0,
                extra_body={"forced_bos_token_id": language, "ignore_eos": True},
            )
            assert answer.choices[0].text == text
