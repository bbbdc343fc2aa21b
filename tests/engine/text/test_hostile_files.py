"""Tokenizer files that are broken or lie: refused by name, or read; nothing else is raised."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import EngineFault, InvalidRequest, ModelLoadError, QuireError
from engine.text.chat_template import render_chat
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.jinja_sandbox import RenderLimits
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.tokenizer_files import eos_ids, read_generation_config, sampling_defaults
from tests.engine.text import folders

KINDS = {
    "byte-level": (folders.byte_level, folders.CHATML_CONFIG),
    "sentencepiece": (folders.sentencepiece_bpe, folders.SENTENCEPIECE_CONFIG),
    "unigram": (folders.metaspace_unigram, folders.SENTENCEPIECE_CONFIG),
    "wordpiece": (folders.wordpiece, {"unk_token": "[UNK]"}),
}
SPECIAL = {
    "eos_token": {"content": "<|im_end|>", "lstrip": False},
    "bos_token": "<|endoftext|>",
    "additional_special_tokens": ["<a>"],
}
ODD: list[Any] = [
    None, 0, -1, 1 << 31, 10**400, 1.5, float("nan"), "", "\ud800", "a\0b", "x" * 5000, True, [],
    [[]], {}, {"content": 5}, [None],
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sound")
    folders_by_kind = {}
    for kind, (tokenizer, config) in KINDS.items():
        folders_by_kind[kind] = folders.save(folder / kind, tokenizer(), dict(config))
        (folders_by_kind[kind] / "special_tokens_map.json").write_text(json.dumps(SPECIAL))
    return folders_by_kind


@pytest.fixture
def folder(sound: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sound["byte-level"], tmp_path / "m")


def error_of(call: Callable[[], object]) -> QuireError | None:
    """The typed error that a call ends with; any other one is raised."""
    try:
        call()
    except QuireError as error:
        return error
    return None


def use(folder: Path) -> None:
    """Load and use it. Raises unless it works, is refused by its file's name, or refuses a text."""
    refused = error_of(lambda: load_tokenizer(folder))
    if refused is not None:
        assert isinstance(refused, ModelLoadError)
        assert str(folder) in refused.message
        assert len(refused.message.encode()) < 2000
        return
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.byte_rules
    assert len(tokens) == 3

    def speak() -> None:
        for text in ("Hello wörld <|im_end|> 東京", ""):
            tokenizer.decode(tokenizer.encode(text))
            tokenizer.encode(text, parse_special=False)
        render_chat(tokenizer, [{"role": "user", "content": "hi"}])

    unread = error_of(speak)
    assert unread is None or (unread.status == 400 and len(unread.message) < 2000)


def paths_of(value: Any, index: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something could stand in for what is there; of long lists and objects their start."""
    yield index
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())[:12]
    elif isinstance(value, list):
        items = list(enumerate(value[:2]))
    for key, inner in items:
        yield from paths_of(inner, (*index, key))


def replaced(value: Any, index: tuple[Any, ...], by: Any) -> Any:
    if not index:
        return by
    value = copy.deepcopy(value)
    parent = value
    for key in index[:-1]:
        parent = parent[key]
    parent[index[-1]] = by
    return value


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_fault_40_odd_values_anywhere(
    kind: str, name: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(sound[kind], tmp_path / "m")
    full_payload = json.loads((folder / name).read_text())
    rng = random.Random(11)
    for path in paths_of(full_payload):
        for value in rng.sample(ODD, 3):
            (folder / name).write_text(json.dumps(replaced(full_payload, path, value)))
            use(folder)


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:8].encode("ascii", "replace"))
def test_fault_40_odd_special_tokens(value: Any, folder: Path) -> None:
    for path in paths_of(SPECIAL):
        text = json.dumps(replaced(SPECIAL, path, value))
        (folder / "special_tokens_map.json").write_text(text)
        use(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_fault_30_files_cut_or_changed_anywhere(name: str, folder: Path) -> None:
    full_data = (folder / name).read_bytes()
    rng = random.Random(5)
    for turn in range(60):
        content = bytearray(full_data)
        if turn % 3:
            for _ in range(3):
                content[rng.randrange(len(content))] = rng.randrange(256)
        else:
            del content[rng.randrange(len(content)) :]
        (folder / name).write_bytes(content)
        use(folder)


def changed(folder: Path, **model: Any) -> Path:
    path = folder / "tokenizer.json"
    full_payload = json.loads(path.read_text())
    full_payload["model"] |= model
    path.write_text(json.dumps(full_payload))
    return folder


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize("escaped", [False, True])
def test_fault_40_merges_without_their_prefix(escaped: bool, folder: Path) -> None:
    """The library would cut a character in half and end the process."""
    changed(folder, continuing_subword_prefix="x")
    if escaped:
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace("continuing_sub", r"continuing\u005fsub"))
    refused(folder, "tokenizer.json", "continuing_subword_prefix")


def test_fault_40_an_id_far_beyond_the_others(folder: Path) -> None:
    """Lists of all ids below it would take gigabytes."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    refused(changed(folder, vocab=vocab | {"new": 1 << 31}), "tokenizer.json", "largest id")


def test_a_vocabulary_with_gaps_is_read(folder: Path) -> None:
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = load_tokenizer(changed(folder, vocab=vocab | {"new": 60_000}))
    assert tokenizer.vocab_size == 60_001


def test_fault_40_a_panic_of_the_library(folder: Path) -> None:
    path = folder / "tokenizer.json"
    full_payload = json.loads(path.read_text())
    full_payload["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(full_payload))
    refused(folder, "tokenizer.json", "no tokenizer")


def test_fault_40_a_decoder_that_panics_over_an_empty_text(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]}
    path.write_text(json.dumps(content))
    refused(folder, "tokenizer.json", "no tokenizer")


def panicking(folder: Path) -> Path:
    """Let the decoder panic on the token "!" alone: it cuts one character at both ends."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "Strip", "content": "!", "start": 1, "stop": 1}
    path.write_text(json.dumps(content))
    return folder


def test_fault_40_a_decoder_that_panics_on_one_token(folder: Path) -> None:
    tokenizer = load_tokenizer(panicking(folder))
    [bang] = tokenizer.encode("!")
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    text = IncrementalDetokenizer(tokenizer, [])
    for decode in (lambda: tokenizer.decode([bang]), lambda: text.push([bang])):
        with pytest.raises(EngineFault, match="tokenizer can't decode"):
            decode()


def test_fault_40_a_request_with_such_a_token_fails_alone(
    folder: Path, model_folder: Callable[[str], Path]
) -> None:
    llm = LLM(
        str(model_folder("llama")), tokenizer=str(panicking(folder)), num_gpu_blocks_override=9
    )
    [bang] = llm.get_tokenizer().encode("!", add_special_tokens=False)
    ids = llm.get_tokenizer().encode("Hello", add_special_tokens=False)
    params = [SamplingParams(allowed_token_ids=[token], max_tokens=3) for token in (ids[0], bang)]
    good, bad = llm.generate([ids, ids], params, use_tqdm=False)
    assert isinstance(bad.error, EngineFault)
    assert bad.outputs[0].finish_reason == "error"
    assert good.error is None
    assert good.outputs[0].text


def test_fault_40_special_tokens_around_texts_that_are_not_there(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(sound["sentencepiece"], tmp_path / "m")
    path = folder / "tokenizer.json"
    full_payload = json.loads(path.read_text())
    full_payload["post_processor"]["single"][0]["SpecialToken"]["id"] = "<nobody>"
    path.write_text(json.dumps(full_payload))
    refused(folder, "tokenizer.json", "no tokenizer")


def test_a_text_that_the_tokenizer_has_no_tokens_for_is_the_requests_fault(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(sound["wordpiece"], tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text("{}")
    tokenizer: Tokenizer = load_tokenizer(changed(folder, unk_token="[NOBODY]"))
    assert tokenizer.encode("the")
    for read in (tokenizer.encode, tokenizer.encode_as_text, tokenizer.encode_parts):
        with pytest.raises(InvalidRequest, match="can't read the text"):
            read("∑∑")


FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json",
    "chat_template.jinja", "additional_chat_templates/rag.jinja",
]  # fmt: skip


@pytest.mark.parametrize("how", ["pipe", "folder", "huge"])
@pytest.mark.parametrize("name", FILES)
def test_fault_30_what_is_no_file_or_too_large_is_not_read(
    name: str, how: str, folder: Path
) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)  # would be read for ever
    elif how == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    refused(folder, str(path), "is no file" if how != "huge" else "bytes")


# -- generation_config.json -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\xff", b"[" * 100_000, b'{"a": 1' + b"0" * 5000]
)
def test_fault_30_a_generation_config_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


def test_fault_30_a_generation_config_that_never_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is no file"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_odd_defaults_are_left_out(name: str, tmp_path: Path) -> None:
    for value in [*ODD, *([value] for value in ODD)]:
        (tmp_path / "generation_config.json").write_text(
            json.dumps({name: value, "eos_token_id": value})
        )
        generation = read_generation_config(tmp_path)
        assert all(0 <= token < 100 for token in eos_ids(generation, (1, None), 100))
        defaults = sampling_defaults(generation)
        assert set(defaults) <= {name}
        assert not defaults or isinstance(defaults[name], (int, float))


# -- chat templates -------------------------------------------------------------------------------

TEMPLATES = {
    "no Jinja": "{% for %}",
    "unfinished": "{% if messages %}",
    "deep": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "long": "x" * (600 * 1024),
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "gigabytes": "{{ 'x' * 10 ** 12 }}",
    "doubling": "{% set ns = namespace(t='x' * 99) %}"
    "{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "squaring": "{% set ns = namespace(n=3) %}"
    "{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "batches": "{{ [1] | batch(10 ** 10, 1) | list }}",
    "slices": "{{ [1] | slice(10 ** 10, 1) | list }}",
    "joins": "{{ ([1] * 99999) | join('x' * 99999) }}",
    "joins long texts": "{{ ''.join(['x' * 9999999] * 9999) }}",
    "replaces": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "wraps": "{{ ('x ' * 99999) | wordwrap(1, true, 'y' * 99999) }}",
    "sums": "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
    "indents": "{{ [1] | tojson(indent=10 ** 10) }}",
    "tells a list": "{{ [['x' * 9999999] * 999] * 999 }}",
    "tells a list in a text": "{{ '%s' % (['x' * 9999999] * 999) }}",
    "tells a list by a filter": "{{ (['x' * 9999999] * 999) | upper }}",
    "escapes": "{{ messages.__class__.__mro__ }}",
    "recursive": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "no filter": "{{ messages | nobody }}",
    "divides by 0": "{{ 1 / 0 }}",
    "surrogate": "{{ '\\ud800' }}",
}


#: U+FFFD stands for what is no character.
HARMLESS = (TEMPLATES["surrogate"],)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_fault_40_templates_that_do_harm_end_with_a_typed_error(
    template: str, folder: Path
) -> None:
    """The model is there for prompts without a template; a chat says what is wrong."""
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    chat = [{"role": "user", "content": "hi"}]
    error = error_of(lambda: render_chat(tokenizer, chat, limits=RenderLimits(steps=10_000)))
    if template in HARMLESS:
        assert error is None
    else:
        assert error is not None
        assert error.status == 400
        assert len(error.message) < 2000


#: What templates are made of, whole and in pieces.
TEMPLATE_PARTS = [
    *("{% for m in messages %}", "{% endfor %}", "{{ m.role }}", "{{ m['content'] | trim }}"),
    *("{% if add_generation_prompt %}", "{% else %}", "{% endif %}", "{%- set x = messages -%}"),
    *("{{ x[0] }}", "{{ x * 9 }}", "{% set x = x + x %}", "{{ '%*d' % (9, 9) }}", "{{ m|tojson }}"),
    *("{{ raise_exception('no') }}", "{{ x.append(x) }}", "{{ x }}", "{{ messages[9].a.b }}"),
    *("{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}", "{{ caller() }}", "{% call f(1) %}"),
    *("{% endcall %}", "{% generation %}", "{% endgeneration %}", "{% break %}", "{% include 1 %}"),
    *("{{ '{:9}'.format(x) }}", "{{ ''.join(x) }}", "{{ x | length }}", "{{ 10 ** 9 ** 9 }}"),
    *("{{ x | batch(9 ** 9, x) | list }}", "{{ x | join(x | string) }}", "{{ x | sum(start=x) }}"),
    *(
        "{{ x | replace('a', x) }}",
        "{% set x = [x] * 999 %}",
        "{{ x | tojson(indent=x | length) }}",
    ),
    *("{{ namespace(a=x) }}", "{{ strftime_now('%Y') }}", "{#", "#}", "{{", "}}", "{%", "|", "é🙂"),
]


def test_fault_40_templates_of_any_pieces_render_or_end_with_a_typed_error(folder: Path) -> None:
    rng, rendered, refused = random.Random(21), 0, 0
    tokenizer = load_tokenizer(folder)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<|im_end|>"}]
    limits = RenderLimits(steps=2_000, seconds=5.0, chars=100_000)
    for _ in range(250):
        template = "".join(rng.choices(TEMPLATE_PARTS, k=rng.randint(1, 5)))
        error = error_of(
            lambda: render_chat(tokenizer, chat, chat_template=template, limits=limits)  # noqa: B023
        )
        rendered += error is None
        refused += error is not None
        assert error is None or (error.status == 400 and len(error.message) < 2000)
    assert min(rendered, refused) > 20
