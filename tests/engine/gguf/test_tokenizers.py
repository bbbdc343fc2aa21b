"""Tokenizers made of a GGUF file's metadata."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from engine.checkpoints.gguf.file import Header
from engine.checkpoints.gguf.tokenizer import eos_token_ids, make_tokenizer, tokenizer_config
from engine.contract.errors import ModelLoadError
from engine.text.vocabulary import ByteDecoder

LETTERS = ["▁", "a", "b", "c", "d", "e"]


def metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: control tokens, bytes, letters, and pieces with random scores."""
    rng = random.Random(3)
    chunks: list[str] = []
    vocabulary = list(LETTERS)
    while len(chunks) < 60:
        chunk = rng.choice(vocabulary) + rng.choice(vocabulary)
        if chunk not in vocabulary and len(chunk) < 7:
            chunks.append(chunk)
            vocabulary.append(chunk)
    rng.shuffle(chunks)
    control, octets = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *octets, *LETTERS, *chunks, "<|turn|>"]
    scores = [0.0] * 259 + [-1e6] * len(LETTERS) + [-float(i) for i in range(len(chunks))] + [0.0]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(LETTERS) + len(chunks)), 3]
    metadata = {
        "model": "llama", "tokens": tokens, "scores": np.array(scores),
        "token_type": np.array(kinds),
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items()}


def by_scores(word: str, values: dict[str, Any]) -> list[str]:
    """SentencePiece's own way: merge the neighbours that make the best piece, until none do."""
    tokens = values["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, values["tokenizer.ggml.scores"], strict=True))
    parts = list(word)
    while True:
        pairs = [
            (-scores[first + right], index)
            for index, (first, right) in enumerate(itertools.pairwise(parts))
            if first + right in scores
        ]
        if not pairs:
            return parts
        offset = min(pairs)[1]
        parts[offset : offset + 2] = [parts[offset] + parts[offset + 1]]


def test_pieces_are_merged_by_their_scores() -> None:
    values = metadata()
    tokenizer = make_tokenizer(Header(values, {}))
    rng = random.Random(5)
    for _ in range(200):
        words = ["".join(rng.choices("abcde", k=rng.randint(1, 8))) for _ in range(4)]
        text = " ".join(words)
        expected = by_scores("▁" + text.replace(" ", "▁"), values)
        encoding = tokenizer.encode(text)
        assert encoding.tokens == ["<s>", *expected]
        assert tokenizer.decode(encoding.ids) == text


def test_what_has_no_piece_becomes_bytes_and_comes_back() -> None:
    tokenizer = make_tokenizer(Header(metadata(), {}))
    tokens = tokenizer.encode("aé<|turn|>b").tokens
    index = tokens.index("<0xC3>")
    assert tokens[index + 1 : index + 3] == ["<0xA9>", "<|turn|>"]
    assert tokenizer.decode(tokenizer.encode("aéb").ids) == "aéb"


def test_switches_of_the_file() -> None:
    tokenizer = make_tokenizer(Header(metadata(add_bos_token=False, add_space_prefix=False), {}))
    assert tokenizer.encode("ab").tokens == by_scores("ab", metadata())
    values = {**metadata(eot_token_id=5), "tokenizer.chat_template": "{{ messages }}"}
    header = Header(values, {})
    assert eos_token_ids(header) == [2, 5]
    assert tokenizer_config(header) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }  # fmt: skip


TEXTS = ["It's 1234 HelloWorld", "a  b\n\n c9d 3.14", "naïve ×7 (x+1)==y\t42"]


def cut(pre: str, text: str) -> list[str]:
    tokenizer = make_tokenizer(Header(metadata(model="gpt2", pre=pre, merges=["a b"]), {}))
    return [chunk for chunk, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["command-r", "starcoder", "refact", "smollm"])
def test_digits_are_cut_apart_as_by_the_checkpoints_own_tokenizers(pre: str) -> None:
    local_sequence = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in TEXTS:
        assert cut(pre, text) == [chunk for chunk, _ in local_sequence.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["phi-2", "olmo"])
def test_others_are_cut_as_gpt_2(pre: str) -> None:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        assert cut(pre, text) == [chunk for chunk, _ in splitter.pre_tokenize_str(text)]


def test_gpt_oss_cuts_where_small_letters_end() -> None:
    assert cut("gpt-4o", "HelloWorld's 1234 ok") == ["Hello", "World's", "Ġ", "123", "4", "Ġok"]
    assert cut("dbrx", "HelloWorld's 1234 ok") == ["HelloWorld", "'s", "Ġ", "123", "4", "Ġok"]


def test_newer_files_are_cut_as_their_folders_are() -> None:
    assert cut("llama4", "HelloWorld's 1234") == cut("gpt-4o", "HelloWorld's 1234")
    assert cut("tekken", "HelloWorld's 12 ok") == ["Hello", "World", "'s", "Ġ", "1", "2", "Ġok"]
    marks = "नमस्ते 12"
    (word, *rest) = cut("qwen35", marks)
    assert (bytes_of(word), rest) == ("नमस्ते", ["Ġ", "1", "2"])
    assert cut("qwen2", marks)[0] != word
    tokens = [bytes_of(token) for token in cut("deepseek-v3", "1234 東京です, .end x;;\n")]
    assert tokens == ["123", "4", " ", "東京です", ",", " .", "end", " x", ";;\n"]


def bytes_of(token: str) -> str:
    return ByteDecoder(byte_level=True).to_bytes(token).decode()


def test_gemma_4_merges_characters_and_keeps_spaces() -> None:
    values = metadata(model="gemma4", merges=["a b", "▁ c"])
    values["tokenizer.ggml.tokens"] = [*metadata()["tokenizer.ggml.tokens"][:-3], "ab", "▁c", "\n"]
    values["tokenizer.ggml.token_type"][-1] = 1
    tokenizer = make_tokenizer(Header(values, {}))
    encoding = tokenizer.encode("ab cé\n")
    assert encoding.tokens == ["<s>", "ab", "▁c", "<0xC3>", "<0xA9>", "\n"]
    assert tokenizer.decode(encoding.ids) == "ab cé\n"


def test_fault_90_ends_of_turns_are_known_by_their_texts() -> None:
    def ends(*texts: str, kind: int = 3) -> list[str]:
        values = metadata()
        tokens = [*values["tokenizer.ggml.tokens"], *texts]
        kinds = [*values["tokenizer.ggml.token_type"], *[kind] * len(texts)]
        scores = [*values["tokenizer.ggml.scores"], *[0.0] * len(texts)]
        added = {"tokens": tokens, "token_type": np.array(kinds), "scores": np.array(scores)}
        return [tokens[index] for index in eos_token_ids(Header(metadata(**added), {}))]

    assert ends("<|im_end|>", "<|fim_prefix|>") == ["</s>", "<|im_end|>"]
    assert ends("<|im_end|>", kind=1) == ["</s>"]
    texts = ("<|end|>", "[EOT]", "[EOS]", "<|flush|>", "<|calls|>", "<｜end▁of▁sentence｜>")
    for text in (*texts, "<|tool_response>", "<eos>"):
        assert ends(text) == ["</s>", text]
    assert ends("<|end|>", "<|call|>", "<|return|>") == ["</s>", "<|return|>", "<|call|>"]


def test_fault_90_templates_by_name_and_a_token_behind_each_text() -> None:
    values = {
        **metadata(add_eos_token=True),
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use", "absent"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    header = Header(values, {})
    assert tokenizer_config(header)["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    assert make_tokenizer(header).encode("ab").tokens[-1] == "</s>"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"model": "gpt2", "pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'"),
        ({"model": "gpt2", "merges": ["a b c"]}, "no pair"),
        ({"tokens": []}, "no tokenizer.ggml.tokens"),
        ({"scores": np.array([1.0])}, "scores has not as many"),
        ({"token_type": np.array([1])}, "token_type has not as many"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
    ],
)
def test_what_is_not_known_or_not_sound_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        make_tokenizer(Header(metadata(**changes), {}))
