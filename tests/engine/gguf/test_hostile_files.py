"""GGUF files that lie about themselves are refused before anything is made of them."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from engine.checkpoints.gguf.config import make_config
from engine.checkpoints.gguf.file import Header, read_header
from engine.checkpoints.gguf.folder import find_gguf, gguf_folder
from engine.checkpoints.gguf.tokenizer import make_tokenizer
from engine.checkpoints.gguf.weights import GGUFWeights
from engine.contract.errors import ModelLoadError
from tests.engine.gguf.files import everywhere, write_gguf
from tests.engine.models import make_model


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(
    *values: bytes, tensors: tuple[bytes, ...] = (), num_tensors: int | None = None
) -> bytes:
    count = len(tensors) if num_tensors is None else num_tensors
    start = b"GGUF" + struct.pack("<IQQ", 3, count, len(values))
    return start + b"".join(values) + b"".join(tensors)


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


BIG = 2**63
BROKEN = {
    "nothing": (b"", "promises more"),
    "another format": (b"PK\x03\x04" + bytes(60), "doesn't begin with GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version is"),
    "2^63 values": (b"GGUF" + struct.pack("<IQQ", 3, 0, BIG), "promises more"),
    "2^63 tensors": (header(num_tensors=BIG), "promises more"),
    "a key of 2^63 bytes": (header(struct.pack("<Q", BIG) + bytes(40)), "a string of"),
    "a key past the end": (header(struct.pack("<Q", 5000) + bytes(40)), "promises more"),
    "a value twice": (header(number("a", 1), number("a", 2)), "a is given twice"),
    "an unknown type": (header(text("a") + struct.pack("<I", 99)), "type 99"),
    "an array of 2^63 strings": (header(text("a") + struct.pack("<IIQ", 9, 8, BIG)), "promises"),
    "an array of 2^63 numbers": (header(text("a") + struct.pack("<IIQ", 9, 4, BIG)), "promises"),
    "an array of arrays": (
        header(text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(80)), "array of type 9",
    ),
    "an alignment of 3": (header(number("general.alignment", 3)), "no power of two"),
    "an alignment of 0": (header(number("general.alignment", 0)), "no power of two"),
    "a tensor of no size": (header(tensors=(tensor("t", [0]),)), "no whole blocks"),
    "a tensor of 2^63 values": (header(tensors=(tensor("t", [BIG]),)), "lies outside"),
    "a product that overflows": (header(tensors=(tensor("t", [2**32, 2**32]),)), "outside"),
    "five dimensions": (header(tensors=(tensor("t", [1] * 5),)), "5 dimensions"),
    "half a block": (header(tensors=(tensor("t", [33, 4], 8),)), "no whole blocks of 32"),
    "a type of the future": (header(tensors=(tensor("t", [4], 200),)), "type 200"),
    "a type that isn't read": (header(tensors=(tensor("t", [256], 16),)), "IQ2_XXS"),
    "an offset past the end": (header(tensors=(tensor("t", [4], 0, 2**40),)), "outside"),
    "an offset between": (
        header(tensors=(tensor("t", [4], 0, 4),)) + bytes(200), "isn't aligned",
    ),
    "tensors over each other": (
        header(tensors=(tensor("a", [16]), tensor("b", [16], 0, 32))) + bytes(400), "overlaps",
    ),
    "one name twice": (
        header(tensors=(tensor("a", [8]), tensor("a", [8], 0, 32))) + bytes(400), "there twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_fault_40_a_header_that_lies(case: str, tmp_path: Path) -> None:
    content, words = BROKEN[case]
    with pytest.raises(ModelLoadError, match=words) as error:
        read_header(content)
    assert error.value.param == "model"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return write_gguf(make_model("llama", folder / "m"), folder / "m.gguf", everywhere(Kind.Q8_0))


def test_fault_30_a_file_cut_anywhere(sound: Path) -> None:
    full_data = sound.read_bytes()
    for size in [*range(64), *range(64, len(full_data), len(full_data) // 60)]:
        with pytest.raises(ModelLoadError):
            read_header(full_data[:size])


def test_fault_40_bytes_changed_anywhere_do_no_harm(sound: Path) -> None:
    """Whatever the header says then, it's read or refused: nothing else is raised."""
    full_data = sound.read_bytes()
    start = min(info.offset for info in read_header(full_data).tensors.values())
    rng = random.Random(7)
    refused = 0
    for _ in range(400):
        changed = bytearray(full_data)
        for _ in range(3):
            changed[rng.randrange(start)] = rng.randrange(256)
        try:
            header = read_header(bytes(changed))
            make_config(header, bytes(changed))
            make_tokenizer(header)
        except ModelLoadError:
            refused += 1
    assert refused > 50


def test_fault_30_an_empty_file_and_one_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"empty\.gguf can't be read"):
        gguf_folder(tmp_path / "empty.gguf")
    assert find_gguf(tmp_path / "gone.gguf") is None


def test_a_part_without_the_others_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "m-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf isn't there"):
        find_gguf(part)


LISTS = {"a list of numbers": struct.pack("<IIQII", 9, 4, 2, 1, 1), "no list": b"\x09" + bytes(15)}


@pytest.mark.parametrize("value", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
    "key",
    [
        "split.count", "split.no", "general.architecture", "general.alignment",
        "llama.block_count", "llama.rope.scaling.type", "tokenizer.ggml.model",
        "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id",
        "tokenizer.chat_template",
    ],
)  # fmt: skip
def test_fault_40_lists_where_none_belong(
    key: str, value: bytes, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused or make no difference."""
    monkeypatch.setattr("engine.checkpoints.gguf.folder.cache_dir", lambda: tmp_path / "cache")
    (created,) = (
        read_header(header(text(key) + value)).metadata.values()
        if key != ("general.alignment")
        else ([1, 1],)
    )

    def changed(buffer: object) -> Header:
        header = read_header(buffer)
        return Header({**header.metadata, key: created}, header.tensors)

    monkeypatch.setattr("engine.checkpoints.gguf.file.read_header", changed)
    with contextlib.suppress(ModelLoadError):
        gguf_folder(sound)


def test_other_architectures_are_refused_by_name() -> None:
    values = text("general.architecture") + struct.pack("<I", 8) + text("mamba")
    with pytest.raises(ModelLoadError, match="architecture 'mamba' aren't supported"):
        make_config(read_header(header(values)), lambda name: b"")


def test_a_tensor_that_is_absent_or_misshapen_is_named(sound: Path) -> None:
    weights = GGUFWeights(sound)
    with pytest.raises(ModelLoadError, match=r"has no 'blk\.9\.attn_q\.weight'"):
        weights.get("model.layers.9.self_attn.q_proj.weight", (64, 64))
    with pytest.raises(ModelLoadError, match=r"shape \(64, 64\), but the metadata"):
        weights.get("model.layers.0.self_attn.q_proj.weight", (32, 64))
