"""Whisper in CTranslate2's layout: `model.bin`, config.json, the tokenizer and the vocabulary.

`ctranslate2_folder` writes everything in the folder except weights to the cache, in the form in
which the engine and gateways read any model. `CTranslate2Weights` provides the weights under the
names in `transformers`. The layout is that of `ctranslate2.specs.model_spec`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.safetensors import MappedFile, ReadProgress
from engine.contract.errors import ModelLoadError
from engine.quantization.packing import DenseSource, WeightSource
from engine.system.cache_folder import cache_dir, cache_entry
from engine.text.tokenizer_files import parse_object, read_text

MODEL_FILE = "model.bin"
_SOURCE = "source.json"
#: Version of the written form; folders of another version are written again.
_FORM = 1
#: Versions of the binary format that store a type and size per variable.
_VERSIONS = range(5, 7)
_SPEC = "WhisperSpec"
_MAX_VARIABLES = 100_000
_MAX_RANK = 4
_DTYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: CTranslate2's numbers of the activations in Whisper checkpoints.
_ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "silu", 3: "gelu"}


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor's position in a file, in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class CTranslate2File:
    """The variables of a `model.bin`, validated before any is read.

    Attributes:
        variables: by name, aliases included.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ModelLoadError` for a file that is invalid, or of another kind of model."""
        self.file = MappedFile(path)
        self._position = 0
        self.variables: dict[str, Variable] = {}
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._error(f"its version is {version}; {_VERSIONS[0]} and 6 are read")
        spec, _ = self._text(), self._number("I")
        if spec != _SPEC:
            raise self._error(f"it holds a {spec:.40}; only {_SPEC} is supported")
        for _ in range(self._count()):
            self._read_variable()
        for _ in range(self._count()):
            alias, name = self._text(), self._text()
            if name not in self.variables:
                raise self._error(f"{alias:.80} is an alias of {name:.80}, which it lacks")
            self._add(alias, self.variables[name])
        if self._position != self.file.size:
            raise self._error(f"{self.file.size - self._position} bytes follow its last variable")

    def tensor(self, name: str) -> Tensor:
        """Return a variable, backed by the file. Raises `ModelLoadError` if it is missing."""
        variable = self.variables.get(name)
        if variable is None:
            raise self._error(f"it has no {name}")
        return self.file.tensor(variable.offset, variable.dtype, variable.shape)

    def integer(self, name: str) -> int:
        """Return the value of a variable with one number."""
        values = self.tensor(name)
        if values.numel() != 1 or values.is_floating_point():
            raise self._error(f"{name} must be one integer")
        return int(values.reshape(()))

    def rows(self, name: str, rank: int) -> tuple[int, ...]:
        """Return a variable's shape, which must have `rank` dimensions."""
        variable = self.variables.get(name)
        if variable is None or len(variable.shape) != rank:
            raise self._error(f"{name} must be there with {rank} dimensions")
        return variable.shape

    def _read_variable(self) -> None:
        name, rank = self._text(), self._number("B")
        if rank > _MAX_RANK:
            raise self._error(f"{name:.80} has {rank} dimensions")
        shape = tuple(self._number("I") for _ in range(rank))
        kind, size = self._number("B"), self._number("I")
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise self._error(f"{name:.80} has values of the unknown type {kind}")
        count = 1
        for length in shape:
            count *= length
        if count * dtype.itemsize != size:
            raise self._error(f"{name:.80} of {list(shape)} has {size} bytes")
        if size > self.file.size - self._position:
            raise self._error(f"{name:.80} reaches beyond its end")
        self._add(name, Variable(shape, dtype, self._position))
        self._position += size

    def _add(self, name: str, variable: Variable) -> None:
        if name in self.variables:
            raise self._error(f"it has {name:.80} twice")
        self.variables[name] = variable

    def _count(self) -> int:
        count = self._number("I")
        if count > _MAX_VARIABLES:
            raise self._error(f"it has {count} entries; at most {_MAX_VARIABLES} are read")
        return count

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        if self._position + size > self.file.size:
            raise self._error("it ends too early")
        (value,) = struct.unpack_from(f"<{kind}", self.file.buffer, self._position)
        self._position += size
        return int(value)

    def _text(self) -> str:
        size = self._number("H")
        data = self.file.buffer[self._position : self._position + size]
        self._position += size
        if not size or len(data) != size or data[-1]:
            raise self._error("a name in it isn't terminated")
        try:
            return data[:-1].decode()
        except UnicodeDecodeError as error:
            raise self._error("a name in it isn't UTF-8") from error

    def _error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path} isn't a CTranslate2 model that can be read: {reason}."
        )


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder contains a model in CTranslate2's layout."""
    return (folder / MODEL_FILE).is_file() and not any(folder.glob("*.safetensors"))


def ctranslate2_folder(folder: Path) -> Path:
    """Return the cached folder for a folder in CTranslate2's layout, creating it if necessary.

    Raises `ModelLoadError` for one that is invalid, or has no `tokenizer.json`.
    """
    folder = folder.resolve()
    target = cache_dir() / "ctranslate2" / _identity(folder)
    if (target / _SOURCE).exists():
        return target
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json: copy that of the original model there."
        )
    file = CTranslate2File(folder / MODEL_FILE)
    settings = parse_object(read_text(folder / "config.json"), folder / "config.json")
    tokens = _special_tokens(folder)
    config, generation = make_config(file, settings, tokens)
    with cache_entry(target) as workplace:
        workplace.mkdir(parents=True)
        for name in ("tokenizer.json", "preprocessor_config.json"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, workplace / name)
        _write(workplace / "config.json", config)
        _write(workplace / "generation_config.json", generation)
        _write(
            workplace / "tokenizer_config.json",
            {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>"},
        )
        _write(workplace / _SOURCE, {"folder": str(folder)})
    return target


def source_folder(folder: Path) -> Path | None:
    """Return the folder from which `ctranslate2_folder` created this one; None for others."""
    path = folder / _SOURCE
    if folder.parent != cache_dir() / "ctranslate2" or not path.exists():
        return None
    return Path(json.loads(path.read_text(encoding="utf-8"))["folder"])


def make_config(
    file: CTranslate2File, settings: dict[str, Any], tokens: dict[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json as in `transformers`.

    Args:
        file: the weights, whose shapes determine the model's sizes.
        settings: CTranslate2's config.json.
        tokens: ids of the tokenizer's special tokens.
    """
    hidden, mels, _ = file.rows("encoder/conv1/weight", 3)
    vocab, _ = file.rows("decoder/embeddings/weight", 2)
    positions, _ = file.rows("decoder/position_encodings/encodings", 2)
    frames, _ = file.rows("encoder/position_encodings/encodings", 2)
    activation = _ACTIVATIONS.get(file.integer("decoder/activation"))
    if activation is None:
        raise ModelLoadError(
            f"{file.file.path}: the activation {file.integer('decoder/activation')} isn't "
            "supported."
        )
    missing = {"<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"} - tokens.keys()
    if missing:
        raise ModelLoadError(
            f"tokenizer.json lacks {', '.join(sorted(missing))}.", param="tokenizer"
        )
    end, start = tokens["<|endoftext|>"], tokens["<|startoftranscript|>"]
    dtype = file.variables["decoder/embeddings/weight"].dtype
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": hidden,
        "num_mel_bins": mels,
        "vocab_size": vocab,
        "max_source_positions": frames,
        "max_target_positions": positions,
        "activation_function": activation,
        "dtype": str(dtype if dtype in _FLOATS else torch.float32).removeprefix("torch."),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
    }
    for side in ("encoder", "decoder"):
        config[f"{side}_layers"] = _num_layers(file, side)
        config[f"{side}_attention_heads"] = file.integer(f"{side}/num_heads")
        config[f"{side}_ffn_dim"] = file.rows(f"{side}/layer_0/ffn/linear_0/weight", 2)[0]
    generation = {
        "eos_token_id": end,
        "decoder_start_token_id": start,
        "no_timestamps_token_id": tokens["<|notimestamps|>"],
        "suppress_tokens": settings.get("suppress_ids") or [],
        "begin_suppress_tokens": settings.get("suppress_ids_begin") or [],
        "alignment_heads": settings.get("alignment_heads") or [],
    }
    return config, generation


def _num_layers(file: CTranslate2File, side: str) -> int:
    layers = 0
    while f"{side}/layer_{layers}/self_attention/linear_0/weight" in file.variables:
        layers += 1
    return layers


def _special_tokens(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer.json"
    content = parse_object(read_text(path), path)
    try:
        return {str(token["content"]): int(token["id"]) for token in content["added_tokens"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: added_tokens can't be read: {error}.", param="tokenizer"
        ) from error


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _identity(folder: Path) -> str:
    """Return a value that changes with the path, and the files' sizes and times."""
    parts = [str(folder), str(_FORM)]
    for name in (MODEL_FILE, "config.json", "tokenizer.json"):
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        parts += [name, str(stat.st_size), str(stat.st_mtime_ns)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight's source: a variable, and which of its equal parts (of `num_parts` rows)."""

    variable: str
    part: int = 0
    num_parts: int = 1


def _names(layers: dict[str, int]) -> Iterator[tuple[str, _Stored]]:
    """Return the sources of tensors by their names in `transformers`."""
    for side in ("encoder", "decoder"):
        source, to = f"{side}/", f"model.{side}."
        yield f"{to}embed_positions.weight", _Stored(f"{source}position_encodings/encodings")
        yield from _norm(f"{to}layer_norm", f"{source}layer_norm")
        for layer in range(layers[side]):
            yield from _layer(f"{to}layers.{layer}.", f"{source}layer_{layer}/", side)
    for name in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            yield f"model.encoder.{name}.{part}", _Stored(f"encoder/{name}/{part}")
    yield "model.decoder.embed_tokens.weight", _Stored("decoder/embeddings/weight")


def _layer(to: str, source: str, side: str) -> Iterator[tuple[str, _Stored]]:
    yield from _norm(f"{to}self_attn_layer_norm", f"{source}self_attention/layer_norm")
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        yield from _linear(f"{to}self_attn.{name}", f"{source}self_attention/linear_0", index, 3)
    yield from _linear(f"{to}self_attn.out_proj", f"{source}self_attention/linear_1")
    if side == "decoder":
        yield from _norm(f"{to}encoder_attn_layer_norm", f"{source}attention/layer_norm")
        yield from _linear(f"{to}encoder_attn.q_proj", f"{source}attention/linear_0")
        for index, name in enumerate(("k_proj", "v_proj")):
            yield from _linear(f"{to}encoder_attn.{name}", f"{source}attention/linear_1", index, 2)
        yield from _linear(f"{to}encoder_attn.out_proj", f"{source}attention/linear_2")
    yield from _norm(f"{to}final_layer_norm", f"{source}ffn/layer_norm")
    yield from _linear(f"{to}fc1", f"{source}ffn/linear_0")
    yield from _linear(f"{to}fc2", f"{source}ffn/linear_1")


def _linear(
    to: str, source: str, part: int = 0, num_parts: int = 1
) -> Iterator[tuple[str, _Stored]]:
    # Keys have no bias: the file has zeros.
    for kind in ("weight",) if to.endswith("k_proj") else ("weight", "bias"):
        yield f"{to}.{kind}", _Stored(f"{source}/{kind}", part, num_parts)


def _norm(to: str, source: str) -> Iterator[tuple[str, _Stored]]:
    yield f"{to}.weight", _Stored(f"{source}/gamma")
    yield f"{to}.bias", _Stored(f"{source}/beta")


class CTranslate2Weights:
    """Weights of a folder in CTranslate2's layout, under their names in `transformers`.

    Integers are dequantized: int8 with a scale per row, int16 with one per tensor.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelLoadError` for an invalid file."""
        self.folder = folder
        self._file = CTranslate2File(folder / MODEL_FILE)
        layers = {side: _num_layers(self._file, side) for side in ("encoder", "decoder")}
        self._stored = {
            name: stored
            for name, stored in _names(layers)
            if stored.variable in self._file.variables
        }
        self._read: set[str] = set()
        self._progress = ReadProgress(self._file.file.size)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor, in a float dtype; possibly backed by the mapped file.

        Raises `ModelLoadError` if it is missing or has another shape.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise ModelLoadError(f"{self.folder}: the checkpoint has no {name!r}.")
        tensor = self._file.tensor(stored.variable)
        if len(tensor) % stored.num_parts:
            raise ModelLoadError(
                f"{self.folder}: {stored.variable} can't be divided by {stored.num_parts}."
            )
        rows = len(tensor) // stored.num_parts
        part = slice(stored.part * rows, (stored.part + 1) * rows)
        if (rows, *tensor.shape[1:]) != shape:
            raise ModelLoadError(
                f"{self.folder}: {name!r} has shape {(rows, *tensor.shape[1:])}, but config.json "
                f"asks for {shape}."
            )
        self._read.add(name)
        self._progress.add(name, tensor[part].nbytes)
        if tensor.dtype in _FLOATS:
            return tensor[part]
        return self._multiplied_out(stored.variable, tensor, part)

    def _multiplied_out(self, name: str, tensor: Tensor, rows: slice) -> Tensor:
        """Return rows of an integer tensor as float32."""
        scale = self._file.tensor(f"{name}_scale").float()
        if scale.numel() not in (1, len(tensor)) or not bool((scale > 0).all()):
            raise ModelLoadError(
                f"{self.folder}: {name}_scale must hold one scale above 0, or one by row."
            )
        if scale.numel() > 1:
            scale = scale[rows].view(-1, *([1] * (tensor.dim() - 1)))
        return tensor[rows].float() / scale

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """Return a 2-dimensional tensor, to be read some rows at a time. Raises as `get`."""
        return DenseSource(self.get(name, shape))

    def release(self) -> None:
        """Release the memory of pages that have been read; tensors stay valid."""
        self._file.file.release()

    def unused_names(self) -> list[str]:
        """Return names that nothing has read."""
        return sorted(self._stored.keys() - self._read)

    def close(self) -> None:
        """Close the file; tensors that are still referenced keep it mapped."""
        self._stored = {}
