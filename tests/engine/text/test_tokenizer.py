"""Encoding, decoding and what the files beside tokenizer.json say."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from engine.text import tokenizer_backend as backend
from engine.text.chat_template import render_chat
from engine.text.tokenizer import load_tokenizer
from tests.engine.text import folders
from tests.engine.text.conftest import BYTE_KINDS, KINDS

TEXTS = [
    "",
    "Hello, world!",
    "  two leading spaces and a tab\t.",
    "line\n\n\nbreaks\r\n",
    "naïve café 東京 привет שלום 👩‍👩‍👧‍👦 e\u0301",
    "\u202eright-to-left override\u202c NUL \x00 end",
]


def reference(folder) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_shortened_to_a_number_of_tokens(tokenizer_of, kind, text):
    tokenizer = tokenizer_of(kind)
    for limit in (1, 2, 5, 10**9):
        short = tokenizer.shortened(text, limit)
        assert text.startswith(short)
        assert bool(short) == bool(text)
        size = len(tokenizer.encode(short, add_special_tokens=False))
        assert size <= limit or len(short) == 1
    assert short == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_transformers_does(folder_of, tokenizer_of, kind, text):
    expected = reference(folder_of(kind))
    for special in (True, False):
        got = tokenizer_of(kind).encode(text, add_special_tokens=special)
        assert got == expected.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_decodes_as_the_library_does(folder_of, tokenizer_of, kind, text):
    library = Backend.from_file(str(folder_of(kind) / "tokenizer.json"))
    ids = library.encode(text).ids
    for skip in (True, False):
        assert tokenizer_of(kind).decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_every_single_token_decodes_as_the_library_does(folder_of, tokenizer_of, kind):
    library = Backend.from_file(str(folder_of(kind) / "tokenizer.json"))
    tokenizer = tokenizer_of(kind)
    for token in range(tokenizer.vocab_size):
        assert tokenizer.decode([token], False) == library.decode([token], False)


def test_token_bytes_hold_half_characters(tokenizer_of):
    tokenizer = tokenizer_of("sentencepiece_first")
    euro = [tokenizer.piece_to_id(chunk) for chunk in ("<0xE2>", "<0x82>", "<0xAC>")]
    assert [tokenizer.token_bytes(token) for token in euro] == [b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.decode(euro) == "€"
    assert tokenizer.token_text(euro[0]) == "\ufffd"


def test_ids_without_a_token_decode_to_nothing(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    hello = tokenizer.encode("Hello")
    assert tokenizer.decode([*hello, tokenizer.vocab_size + 7]) == "Hello"


@pytest.mark.parametrize("bad", [-1, 2**32, True, 1.0, "5", None])
def test_fault_03_decode_refuses_what_is_no_token_id(tokenizer_of, bad):
    with pytest.raises(InvalidRequest) as caught:
        tokenizer_of("byte_level").decode([bad])
    assert caught.value.param == "tokens"


def test_special_ids_and_sizes(folder_of, tokenizer_of):
    tokenizer = tokenizer_of("llama3")
    expected = reference(folder_of("llama3"))
    assert tokenizer.vocab_size == len(expected)
    assert tokenizer.eos_token_id == expected.eos_token_id
    assert tokenizer.bos_token_id == expected.bos_token_id
    assert tokenizer.special_token_ids == set(expected.all_special_ids) | {
        expected.convert_tokens_to_ids(text) for text in folders.SPECIALS
    }


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_fault_15_typed_control_tokens_are_characters(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    for special in sorted(tokenizer.special_tokens - {"<unk>"}):
        text = f"say {special} twice {special}"
        parsed = tokenizer.encode(text, add_special_tokens=False)
        baseline_token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.special_token_ids & set(parsed)
        assert not set(baseline_token_ids) & (
            tokenizer.special_token_ids - {tokenizer.piece_to_id("<unk>")}
        )
        if kind != "unigram":  # its vocabulary lacks some of the characters
            assert tokenizer.decode(baseline_token_ids, skip_special_tokens=True).strip() == text


def test_plain_encoding_still_adds_what_the_model_expects(tokenizer_of):
    tokenizer = tokenizer_of("llama3")
    baseline_token_ids = tokenizer.encode("a <|im_end|>", parse_special=False)
    assert baseline_token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.special_token_ids.isdisjoint(baseline_token_ids[1:])


def test_fault_16_lone_surrogates_become_replacement_characters(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_fault_16_a_megabyte_of_combining_marks(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    text = "e" + "\u0301" * 500_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_must_be_a_string(tokenizer_of):
    with pytest.raises(InvalidRequest):
        tokenizer_of("byte_level").encode(b"bytes")


def test_settings_declare_special_tokens_that_the_json_lacks(tmp_path):
    backend = folders.byte_level()
    config = {"eos_token": "<|new_eos|>", "image_token": "<image>", "pad_token": "<|im_end|>"}
    config["extra_special_tokens"] = ["<extra>"]
    path = folders.save(tmp_path, backend, config)
    tokenizer, expected = load_tokenizer(path), reference(path)
    text = "a <|new_eos|><image> <extra>"
    assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.eos_token_id == expected.eos_token_id
    assert {"<|new_eos|>", "<image>", "<extra>"} <= tokenizer.special_tokens
    assert tokenizer.decode(tokenizer.encode(text)) == "a  "


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    backend = folders.byte_level()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64)
    path = folders.save(tmp_path, backend, folders.CHATML_CONFIG)
    text = "a longer text than three tokens"
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.system
def test_loading_needs_no_torch(folder_of):
    code = (
        "import sys, engine.text.chat_template; from engine.text.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(folder_of('byte_level'))!r}).encode('a', parse_special=False);"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_dont_disturb_each_other(tokenizer_of):
    """Reading control tokens and not reading them go on at once, each as if alone."""
    tokenizer = tokenizer_of("byte_level")
    text = "a <|im_end|> b " * 20
    expected = {flag: tokenizer.encode(text, parse_special=flag) for flag in (True, False)}
    with ThreadPoolExecutor(8) as pool:
        flags = [k % 2 == 0 for k in range(400)]
        results = list(pool.map(lambda flag: tokenizer.encode(text, True, flag), flags))
    assert all(ids == expected[flag] for flag, ids in zip(flags, results))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_read_as_a_short_one_is(folder_of, tokenizer_of, kind):
    text = " ".join(TEXTS) * 200
    expected = reference(folder_of(kind)).encode(text, add_special_tokens=True)
    assert tokenizer_of(kind).encode(text) == expected
    assert tokenizer_of(kind).encode_as_text(text) == tokenizer_of(kind).encode(
        text, add_special_tokens=False
    )


def test_fault_53_other_threads_run_while_a_long_text_is_read(tokenizer_of):
    tokenizer = tokenizer_of(next(iter(KINDS)))
    text = "All work and no play makes a dull text. " * 10_000
    with ThreadPoolExecutor(1) as threads:
        reading, num_yields = threads.submit(tokenizer.encode, text), 0
        while not reading.done():
            time.sleep(0.001)
            num_yields += 1
    assert len(reading.result()) > 10_000
    assert num_yields > 20, "Python's lock was held from the first character to the last"


def test_more_tokens_than_any_context_holds_are_refused(tokenizer_of, monkeypatch):
    monkeypatch.setattr(backend, "MAX_TOKENS", 100)
    monkeypatch.setattr(backend, "_OF_A_CUT", 1)
    with pytest.raises(ContextLengthExceeded, match="100 are the most"):
        tokenizer_of(next(iter(KINDS))).encode("dull " * 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_far_over_what_is_of_use_is_not_read_to_its_end(tokenizer_of, monkeypatch, kind):
    tokenizer, read = tokenizer_of(kind), []
    full = backend.tokenize

    def noting(of, text, *args, **kwargs):
        read.append(len(text))
        return full(of, text, *args, **kwargs)

    monkeypatch.setattr(backend, "tokenize", noting)
    monkeypatch.setattr(backend, "CHUNK_CHARS", 4096)
    text = "dull days " * 100_000
    for encode in (tokenizer.encode, tokenizer.encode_as_text):
        with pytest.raises(ContextLengthExceeded, match="more than 1000 tokens"):
            encode(text, max_tokens=1000)
    assert sum(read) < len(text) / 4
    assert max(read) <= 4096
    chat = [{"role": "user", "content": text}]
    with pytest.raises(ContextLengthExceeded, match="more than 1000 tokens"):
        render_chat(tokenizer, chat, chat_template="{{messages[0].content}}", max_tokens=1000)
    assert sum(read) < len(text) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_fit_is_read_as_ever_however_long_its_tokens_are(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    for text in ("dull days " * 1000, "a" * 9000, " " * 9000, "\u4e2d\u6587" * 4000):
        expected = tokenizer.encode(text)
        assert tokenizer.encode(text, max_tokens=len(expected)) == expected
        assert tokenizer.encode(text, max_tokens=len(expected) + 100) == expected


#: Longer than a few pieces: words, signs without words, words and runs that are longer than a piece
#: or have no place where two pieces could be told to agree, special tokens.
LONG_TEXTS = {
    "words": " ".join(TEXTS) * 40,
    "one letter": "a" * 6001,
    "spaces": " " * 3000 + "x" + " " * 3001,
    "lines": "\n" * 4001,
    "digits": "31415926535" * 400,
    "script": "".join(chr(0x4E00 + 37 * k % 0x5200) for k in range(4000)),
    "marks": "e" + "\u0301" * 4000,
    "emoji": "\U0001f469\u200d\U0001f467" * 1000,
    "long words": " ".join("abcdefg"[: 1 + k % 7] * (40 * k) for k in range(12)),
    "special": "a <|im_end|>b </s>" * 200,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_a_text_has_the_same_tokens_piece_by_piece(tokenizer_of, monkeypatch, kind, text):
    tokenizer = tokenizer_of(kind)
    full = [tokenizer.encode(text), tokenizer.encode(text, False)]
    monkeypatch.setattr(backend, "CHUNK_CHARS", 600)
    assert [tokenizer.encode(text), tokenizer.encode(text, False)] == full


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_long_text_little_is_in_memory_at_a_time(tokenizer_of, monkeypatch, kind):
    tokenizer, read, full = tokenizer_of(kind), [], backend.tokenize

    def noting(of, text, *args, **kwargs):
        read.append(len(text))
        return full(of, text, *args, **kwargs)

    text = "dull days and work " * 1000
    expected = [tokenizer.encode(text), tokenizer.encode_as_text(text)]
    monkeypatch.setattr(backend, "tokenize", noting)
    monkeypatch.setattr(backend, "CHUNK_CHARS", 1024)
    assert [tokenizer.encode(text), tokenizer.encode_as_text(text)] == expected
    assert max(read) <= 1024
    assert sum(read) < 3 * len(text)
