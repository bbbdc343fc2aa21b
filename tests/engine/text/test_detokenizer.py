"""Streamed text equals the whole text, never shows half a character and never stalls."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import load_tokenizer
from tests.engine.text import folders
from tests.engine.text.conftest import BYTE_KINDS, KINDS

HARD = [
    "e\u0301\u0302\u0323 Z͑ͫ̓ͪ̂ͫ̽",
    "👩‍👩‍👧‍👦👍🏽🇯🇵",
    "\x00\x01\x7f",
    "\u202eabc\u202c שלום عربى",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 漢字 ﷽",
    "\ufffd already replaced \ufffd",
    "▁ Ġ <0xE2> Ċ",
]
TEXTS = st.one_of(
    st.sampled_from(HARD),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text("ab \n<|_e\u0301👩‍👧▁Ġ", max_size=40),
)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def pushes(tokenizer, prompt, ids, cuts=None, **options):
    """What a detokenizer returns for `ids` cut into pushes, and at the end for flush."""
    stream = IncrementalDetokenizer(tokenizer, prompt, **options)
    edges = [0, *sorted(cuts), len(ids)] if cuts is not None else range(len(ids) + 1)
    texts = [stream.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*texts, stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, head=st.sampled_from(["", "a", "The fox ", "x\n"]), skip=st.booleans())
@FEW
def test_whole_text_comes_out_in_whole_characters(tokenizer_of, folder_of, kind, text, head, skip):
    tokenizer = tokenizer_of(kind)
    library = Backend.from_file(str(folder_of(kind) / "tokenizer.json"))
    prompt = library.encode(head).ids
    ids = library.encode(text, add_special_tokens=False).ids
    initial_text = library.decode(prompt, skip)
    full_text = library.decode(prompt + ids, skip)
    parts = pushes(tokenizer, prompt, ids, skip_special_tokens=skip)
    assert "".join(parts) == full_text[len(initial_text) :]
    if "\ufffd" not in full_text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(data=st.data(), skip=st.booleans())
@FEW
def test_random_ids_in_random_pushes(tokenizer_of, kind, data, skip):
    tokenizer = tokenizer_of(kind)
    some_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40)
    ids = data.draw(some_ids)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10))
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "a b", "é\n"])))
    initial_text = tokenizer.decode(prompt, skip)
    full_text = tokenizer.decode(prompt + ids, skip)
    for cut in (cuts, None):
        parts = pushes(tokenizer, prompt, ids, cut, skip_special_tokens=skip)
        assert "".join(parts) == full_text[len(initial_text) :]


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_prefix", "llama3"])
@given(ids=st.lists(st.integers(0, 505), max_size=60), skip=st.booleans())
@FEW
def test_random_ids_of_byte_level_models_equal_the_library(
    tokenizer_of, folder_of, kind, ids, skip
):
    library = Backend.from_file(str(folder_of(kind) / "tokenizer.json"))
    parts = pushes(tokenizer_of(kind), [], ids, skip_special_tokens=skip)
    assert "".join(parts) == library.decode(ids, skip)


def test_leading_space_stays_after_a_prompt_and_goes_at_the_very_start(tokenizer_of):
    tokenizer = tokenizer_of("sentencepiece_first")
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    assert "".join(pushes(tokenizer, [], hello)) == "Hello"
    assert "".join(pushes(tokenizer, [tokenizer.bos_token_id], hello)) == "Hello"
    assert "".join(pushes(tokenizer, tokenizer.encode("Say:"), hello)) == " Hello"


def test_a_character_begun_in_the_prompt_is_finished(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    bear = tokenizer.encode("🐻")
    assert len(bear) > 2
    assert "".join(pushes(tokenizer, bear[:2], bear[2:])) == "🐻"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_first"])
def test_fault_92_half_a_character_of_the_prompt_is_not_in_the_output(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    bear = tokenizer.encode("🐻")
    for size in range(1, min(4, len(bear))):
        prompt, rest = bear[: len(bear) - size], bear[-size:-1]
        initial_text = tokenizer.decode(prompt)
        assert initial_text.endswith("\ufffd")
        for ids in ([], rest, [*rest, *tokenizer.encode("ab", add_special_tokens=False)]):
            output = "".join(pushes(tokenizer, prompt, ids))
            assert output == tokenizer.decode(prompt + ids)[len(initial_text) :]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_first"])
def test_bytes_that_never_complete_dont_stall(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    chunk = "<0x80>" if kind == "sentencepiece_first" else "Ģ"
    token = tokenizer.piece_to_id(chunk)
    assert tokenizer.token_bytes(token) == b"\x80"
    stream = IncrementalDetokenizer(tokenizer, [])
    assert [stream.push([token]) for _ in range(50)] == ["\ufffd"] * 50
    assert stream.flush() == ""


def test_unfinished_character_at_the_end_is_replaced(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    bear = tokenizer.encode("🐻")
    assert pushes(tokenizer, [], bear[:-1])[-1] == "\ufffd"


def test_special_tokens_are_skipped_or_shown(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("a<|im_end|><|im_start|>b")
    assert "".join(pushes(tokenizer, [], ids, skip_special_tokens=True)) == "ab"
    texts = pushes(tokenizer, [], ids, skip_special_tokens=False)
    assert "".join(texts) == "a<|im_end|><|im_start|>b"


def test_spaces_between_special_tokens_where_a_tokenizer_writes_them(tokenizer_of):
    tokenizer = tokenizer_of("word_piece")
    cls, sep = tokenizer.piece_to_id("[CLS]"), tokenizer.piece_to_id("[SEP]")
    ids = [*tokenizer.encode("the"), cls, sep, *tokenizer.encode("fox")]
    options = {"skip_special_tokens": False}
    spaced = pushes(tokenizer, [], ids, spaces_between_special_tokens=True, **options)
    close = pushes(tokenizer, [], ids, spaces_between_special_tokens=False, **options)
    assert "".join(spaced) == "the [CLS] [SEP] fox"
    assert "".join(close) == "the [CLS][SEP] fox"


def test_fault_16_combining_marks_stream_as_they_come(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("e" + "\u0301" * 5000)
    parts = pushes(tokenizer, [], ids)
    assert all(len(part) <= 2 for part in parts)
    assert unicodedata.normalize("NFC", "".join(parts)) == "é" + "\u0301" * 4999


@pytest.mark.parametrize("kind", ["byte_level", "word_piece"])
def test_cost_of_a_token_doesnt_grow_with_the_output(tokenizer_of, kind):
    """Counted in tokens decoded, not in time."""
    tokenizer = tokenizer_of(kind)
    seen = 0
    original = type(tokenizer).decode_window

    def counting(self, ids, skip):
        nonlocal seen
        seen += len(ids)
        return original(self, ids, skip)

    ids = tokenizer.encode("the quick brown fox " * 200)
    stream = IncrementalDetokenizer(tokenizer, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "decode_window", counting)
        for token in ids:
            stream.push([token])
    assert seen <= 40 * len(ids)


#: Decoders with bytes that aren't read token by token, so that a window is decoded.
BYTE_DECODERS = {
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
    "replace_last": [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")],
    "other_space": [decoders.Replace("▁", "_"), decoders.ByteFallback(), decoders.Fuse()],
    "stripped": [
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(" ", 2, 0),
    ],
}


@pytest.mark.parametrize("name", BYTE_DECODERS)
@pytest.mark.parametrize("head", ["", "a", "日本語😀", "x 👋🏽"])
def test_fault_92_a_window_of_bytes_begins_with_a_whole_character(tmp_path, name, head):
    backend = folders.sentencepiece_bpe()
    backend.decoder = decoders.Sequence(BYTE_DECODERS[name])
    folders.save(tmp_path, backend, folders.SENTENCEPIECE_CONFIG)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.byte_rules is None
    prompt = backend.encode(head).ids
    for text in (*HARD, "日本語のテキスト漢字😀😀😀" * 5, "👩‍👩‍👧‍👦👍🏽 ab 😀", "ab😀cd😀ef"):
        ids = backend.encode(text, add_special_tokens=False).ids
        initial_text, full_text = backend.decode(prompt), backend.decode(prompt + ids)
        parts = pushes(tokenizer, prompt, ids)
        assert "".join(parts) == full_text[len(initial_text) :]
        assert "\ufffd" in full_text or not any("\ufffd" in part for part in parts)
