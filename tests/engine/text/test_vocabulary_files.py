"""Tokenizers from vocabulary files: ids as SentencePiece and tiktoken have them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.system.cache_folder import cache_entry
from engine.text import vocabulary_files
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_folder import convert_tokenizer, tokenizer_folder
from engine.text.vocabulary import ByteDecoder

DOCS = Path(__file__).resolve().parents[3] / "docs"
CORPUS = [*(path.read_text() for path in sorted(DOCS.glob("*.md"))[:8]), "東京 が 好き です"]
TEXTS = [
    "Hello, world! What's 12345 + 6?",
    " two  spaces\tand a tab\n\nnew lines  ",
    "東京タワー 🗼 naïve",
    "",
]


def folder_of(path: Path, **config: Any) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["fallback", "unknown"])
def vocabulary_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=request.param,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_start|>"],
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.mark.parametrize(
    ("name", "config", "frame"),
    [
        ("LlamaTokenizer", {}, ["<s>"]),
        ("BaichuanTokenizer", {"add_bos_token": False}, []),
        ("InternLMTokenizer", {"add_eos_token": True}, ["<s>", "</s>"]),
        ("OrionTokenizer", {}, ["<s>"]),
        ("ChatGLMTokenizer", {}, ["[gMASK]", "sop"]),
        ("", {}, ["<s>"]),
    ],
)
def test_sentencepiece_models_give_its_ids(
    vocabulary_model: Path, tmp_path: Path, name: str, config: dict[str, Any], frame: list[str]
) -> None:
    folder = folder_of(tmp_path, tokenizer_class=name, **config)
    (folder / "tokenizer.model").write_bytes(vocabulary_model.read_bytes())
    tokenizer = convert_tokenizer(folder, tmp_path / "converted")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary_model))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text), text
        if oracle.unk_id() not in ids:
            assert tokenizer.decode(ids) == oracle.decode(ids)
    full_token_ids = tokenizer.encode("fox")
    around = [tokenizer.id_to_piece(token) for token in full_token_ids]
    assert [chunk for chunk in around if chunk in frame] == frame
    assert tokenizer.eos_token_id == oracle.eos_id()
    if name == "ChatGLMTokenizer":
        assert tokenizer.piece_to_id("[gMASK]") == oracle.vocab_size() + 1


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """As tiktoken's files have them: the bytes, then what is merged."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    order = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    decoder = ByteDecoder(byte_level=True)
    return {decoder.to_bytes(chunk): index for chunk, index in order}


def check_against_tiktoken(
    tokenizer: Tokenizer, ranks: dict[bytes, int], pattern: str, first: int = 0
) -> None:
    oracle = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [token + first for token in oracle.encode(text)], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "file", "special", "index", "frame"),
    [
        ("QWenTokenizer", "qwen.tiktoken", "<|im_end|>", 2, []),
        ("Phi3SmallTokenizer", "cl100k_base.tiktoken", "<|end|>", 10, []),
        ("ChatGLM4Tokenizer", "tokenizer.model", "<sop>", 1, ["[gMASK]", "<sop>"]),
        ("ChatGLMTokenizer", "tokenizer.model", "<sop>", 1, ["[gMASK]", "<sop>"]),
        ("TikTokenTokenizer", "tiktoken.model", "<sop>", 1, []),
    ],
)
def test_tiktokens_files_give_its_ids(
    ranks: dict[bytes, int],
    tmp_path: Path,
    name: str,
    file: str,
    special: str,
    index: int,
    frame: list[str],
) -> None:
    size = len(ranks)
    declared = {"[gMASK]": size, "<sop>": size + 1} if special == "<sop>" else {}
    entries = {str(n): {"content": token, "special": True} for token, n in declared.items()}
    folder = folder_of(tmp_path, tokenizer_class=name, added_tokens_decoder=entries)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / file).write_text("".join(lines))
    tokenizer = convert_tokenizer(folder, tmp_path / "converted")
    rule = vocabulary_files._RULES["ChatGLM4Tokenizer" if "GLM" in name else name]
    pattern = rule.pattern.replace("&&[^\\p{Han}]", "--\\p{Han}")
    if "--" not in pattern:  # tiktoken's own engine has no such difference of sets
        check_against_tiktoken(tokenizer, ranks, pattern)
    assert tokenizer.encode(special, add_special_tokens=False) == [size + index]
    assert [tokenizer.id_to_piece(n) for n in tokenizer.encode("")] == frame


def test_mistrals_tekken_file_has_its_special_tokens_in_front(
    ranks: dict[bytes, int], tmp_path: Path
) -> None:
    pattern = vocabulary_files._CL100K
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    size = {"default_vocab_size": len(ranks) + 20, "default_num_special_tokens": 20}
    content = {"config": {"pattern": pattern, **size}, "vocab": vocab}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = convert_tokenizer(tmp_path, tmp_path / "converted")
    check_against_tiktoken(tokenizer, ranks, pattern, first=20)
    assert tokenizer.encode("[INST]") == [1, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def tekken(**config: Any) -> bytes:
    config = {"pattern": ".", "default_vocab_size": 1, "default_num_special_tokens": 0} | config
    return json.dumps({"config": config, "vocab": [{"rank": 0, "token_bytes": "YQ=="}]}).encode()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.model", b"\x0a\xff\xff", "no vocabulary that can be read"),
        ("tokenizer.model", b"", "holds no pieces"),
        ("qwen.tiktoken", b"nothing\n", "line 1 must be a token in base64"),
        ("qwen.tiktoken", b"IQ== 0\nIg== 5\n", "without gaps"),
        ("tekken.json", b'{"config": {}}', "malformed entry"),
        ("tekken.json", tekken(pattern="("), "no vocabulary that can be read"),
        ("tekken.json", tekken(default_num_special_tokens=10**12), "default_num_special_tokens"),
        ("tekken.json", tekken(default_vocab_size=float("inf")), "no vocabulary that can be read"),
        ("qwen.tiktoken", base64.b64encode(b"a" * 1025) + b" 0", "at most 1024 characters"),
    ],
)
def test_broken_vocabularies_are_refused(
    tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=words):
        convert_tokenizer(tmp_path, tmp_path / "converted")


def test_bos_that_no_template_can_hold_is_refused(vocabulary_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(vocabulary_model.read_bytes())
    added = {"900": {"content": "x:y", "special": True}}
    folder_of(tmp_path, bos_token="x:y", add_bos_token=True, added_tokens_decoder=added)
    with pytest.raises(ModelLoadError, match="no vocabulary that can be read"):
        convert_tokenizer(tmp_path, tmp_path / "converted")


def test_links_to_nothing_and_folders_are_not_copied(
    vocabulary_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(vocabulary_model.read_bytes())
    (tmp_path / "dangling.json").symlink_to("nowhere")
    (tmp_path / "folder.jinja").mkdir()
    assert convert_tokenizer(tmp_path, tmp_path / "converted").encode("a")


def test_a_folder_of_the_cache_that_another_process_has_made_stays(tmp_path: Path) -> None:
    destination = tmp_path / "entry"
    with cache_entry(destination) as slower:
        slower.mkdir()
        with cache_entry(destination) as faster:
            assert faster != slower
            faster.mkdir()
            (faster / "file").write_text("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["entry", "file"]


def test_a_cache_that_cannot_be_written_is_named(
    vocabulary_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(vocabulary_model.read_bytes())
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelLoadError, match="QUIRE_CACHE_DIR"):
        tokenizer_folder(EngineConfig(model=str(tmp_path)), tmp_path)
