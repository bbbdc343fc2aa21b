"""Reads an adapter, in PEFT's two files or GGUF's one, and checks it against the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoints.torch_files import converted_files
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_digest,
    adapter_files,
    weights_file,
)
from engine.contract.validation import format_value
from engine.lora.adapter import (
    PREFIX,
    Key,
    LoRAAdapter,
    LoRALayer,
    TensorFile,
    check_entry,
    check_rank,
    parse_key,
    shape_error,
    tensor_error,
)
from engine.lora.adapter_config import AdapterConfig, read_adapter_config
from engine.lora.gguf_reader import read_gguf_adapter
from engine.lora.target_modules import Stacks, TargetModules
from engine.lora.vocabulary import AdapterVocabulary, read_vocabulary

#: Maximum bytes of a weights file's header; safetensors itself allows 100 million.
_MAX_HEADER_BYTES = 1 << 26
#: Kinds of tensors that have one value per output.
_VECTORS = ("b_bias", "magnitude", "bias")


def read_adapter(folder: Path, modules: TargetModules, max_rank: int | None = None) -> LoRAAdapter:
    """Read an adapter for the model of these modules into host memory, as its file stores it.

    Everything that the files' headers reveal is checked before the first tensor is read.

    Raises `InvalidRequest`, which names the field or the tensor, for unsupported content, tensors
    that don't fit the model, values that aren't finite, and files that change meanwhile.
    """
    if folder.is_file():
        if not modules.takes_gguf:
            raise InvalidRequest(
                "GGUF adapters are for models that run on Quire's own decoders; PEFT's are "
                "understood here.",
                param="path",
            )
        adapter = read_gguf_adapter(folder, adapter_digest(folder), modules, max_rank)
        if adapter_digest(folder) != adapter.digest:
            raise InvalidRequest("The adapter's file changed while it was read.", param="path")
        return adapter
    fingerprint = _fingerprint(folder)
    digest = adapter_digest(folder)
    config = read_adapter_config(folder)
    weights = _safetensors_file(folder)
    with _opened(weights) as file:
        vocabulary = read_vocabulary(folder, file, config, modules)
        parts = _TensorChecker(config, modules, max_rank, vocabulary)
        keys, stacks = {}, Stacks(config, modules, max_rank)
        classifier: dict[str, str] = {}
        for name in file.keys():  # noqa: SIM118
            if modules.is_unused(_peft_name(name)) or _is_replaced(name, file):
                check_entry(name, file.get_slice(name))
            elif (part := _classifier_part(name, file.get_slice(name), modules)) is not None:
                classifier[name] = part
            elif not stacks.collect(name, file.get_slice(name)):
                keys[name] = parts.check(name, file.get_slice(name))
        pairs = stacks.pairs()
        if pairs and config.dora:
            raise InvalidRequest(
                "DoRA of experts that are one tensor isn't supported: PEFT trains it of experts "
                "that are modules of their own alone.",
                param="use_dora",
            )
        if keys or not (pairs or classifier):
            parts.check_complete(keys)
        adapter, tensors = LoRAAdapter(digest=digest), TensorFile(weights, file)
        for name, key in keys.items():
            _put(adapter, key, modules, tensors.read(name), config.tokens_of(_peft_name(name)))
        for name, key in keys.items():
            _delta(adapter, key, modules).scale = config.scale_of(_peft_name(name))
        _add_tokens(adapter, vocabulary)
        # Replaced rows apply to a tied output layer too, unlike replaced tables.
        if modules.tied and modules.head and "embedding" in adapter.tokens:
            adapter.tokens.setdefault("head", adapter.tokens["embedding"])
            adapter.head = adapter.head or LoRALayer()
        for a, b, pair in pairs:
            adapter.modules |= pair.deltas(tensors.read(a), tensors.read(b))
        adapter.classifier = {part: tensors.read(name) for name, part in classifier.items()}
    if _fingerprint(folder) != fingerprint:
        raise InvalidRequest("The adapter's files changed while they were read.", param="path")
    return adapter


def _fingerprint(folder: Path) -> list[tuple[int, int, int]]:
    """Return a value that changes whenever one of the files is written or replaced."""
    try:
        stats = [file.stat() for file in adapter_files(folder)]
    except OSError as error:
        raise InvalidRequest(
            f"The adapter's folder must hold {CONFIG_FILE} and {WEIGHTS_FILE}: {error.strerror}.",
            param="path",
        ) from error
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _safetensors_file(folder: Path) -> Path:
    """Return the weights file, converted if it is PyTorch's."""
    path = weights_file(folder)
    if path.name == WEIGHTS_FILE:
        return path
    try:
        files = converted_files([path])
    except ModelLoadError as error:
        raise InvalidRequest(error.message, param="path") from error
    if len(files) != 1:
        raise InvalidRequest(
            f"{path.name} must hold tensors, of at most 1 GiB; got {len(files)} such files. Save "
            f"the adapter as {WEIGHTS_FILE}.",
            param="path",
        )
    return files[0]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the file with safetensors, which checks its header, offsets and length."""
    try:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise InvalidRequest(
                f"{WEIGHTS_FILE} isn't a safetensors file: its header would have {length} bytes.",
                param="path",
            )
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(
            f"{WEIGHTS_FILE} isn't a valid safetensors file: {format_value(str(error))}.",
            param="path",
        ) from error


def _peft_name(name: str) -> str:
    """Return PEFT's name of a tensor's module, which patterns are matched with."""
    key = parse_key(name)
    return "" if key is None else key.module


def _is_replaced(name: str, file: Any) -> bool:
    """Whether it is PEFT's copy of the original of a module that the adapter replaces."""
    key = parse_key(name)
    if key is None or key.kind != "unused":
        return False
    part = name.rpartition(".")[2]
    return f"{name.removesuffix(f'.original_module.{part}')}.modules_to_save.{part}" in set(
        file.keys()
    )


class _TensorChecker:
    """Checks the tensors of one file by their headers."""

    def __init__(
        self,
        config: AdapterConfig,
        modules: TargetModules,
        max_rank: int | None,
        vocabulary: AdapterVocabulary,
    ) -> None:
        self._config, self._modules, self._max_rank = config, modules, max_rank
        self._vocabulary = vocabulary

    def check(self, name: str, entry: Any) -> Key:
        """Return the model's name of the tensor's module, and the tensor's kind."""
        key = parse_key(name)
        if key is None:
            raise tensor_error(name, "is nothing that a LoRA adapter has")
        check_entry(name, entry)
        module = self._modules.resolve(key.module)
        if module is None:
            raise tensor_error(
                name, "belongs to no module of this model that an adapter can change"
            )
        rank = self._config.rank_of(key.module)
        if key.kind not in ("table", "tokens"):
            check_rank(rank, self._max_rank)
        shapes = self._shapes(module, rank)
        if key.kind == "tokens" and "table" in shapes:
            shapes = {"tokens": (self._num_tokens(key.module), self._modules.hidden_size)}
        shape, expected = tuple(entry.get_shape()), shapes.get(key.kind)
        if expected is None:
            raise tensor_error(name, "isn't supported for a module of this kind")
        if shape != expected and shape != self._without_new(module, key.kind, expected):
            of_table = module in (self._modules.embedding, self._modules.head)
            vocab = self._rows(module) if of_table else 0
            raise tensor_error(name, shape_error(shape, expected, vocab))
        return Key(module, key.kind)

    def _rows(self, table: str) -> int:
        """Return the rows of the embedding or output layer, including the adapter's tokens."""
        of_embedding = table == self._modules.embedding
        return self._vocabulary.rows("embedding" if of_embedding else "head")

    def _without_new(self, module: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape without vLLM's additional rows, which tables may lack."""
        if kind not in ("embedding_a", "b", "table"):
            return shape
        table = {self._modules.embedding: "embedding", self._modules.head: "head"}.get(module, "")
        if table not in self._vocabulary.num_added:
            return shape
        rows = self._vocabulary.rows(table)
        return tuple(self._modules.vocab_size if size == rows else size for size in shape)

    def _num_tokens(self, table: str) -> int:
        """Return the number of a table's rows that the adapter replaces."""
        if self._modules.tied and not self._modules.head:
            raise InvalidRequest(
                f"{CONFIG_FILE}: trainable_token_indices aren't supported for this model, whose "
                "output layer is tied to its embedding.",
                param="trainable_token_indices",
            )
        if not (ids := self._config.tokens_of(table)):
            param = "trainable_token_indices"
            raise InvalidRequest(
                f"{CONFIG_FILE}: {param} names no token of {format_value(table)}.", param=param
            )
        return len(ids)

    def _shapes(self, module: str, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that a module may have, with their required shapes."""
        modules = self._modules
        vocab, hidden = self._rows(module), modules.hidden_size
        if module == modules.embedding:
            return {
                "embedding_a": (rank, vocab),
                "embedding_b": (hidden, rank),
                "magnitude": (hidden,),
                "table": (vocab, hidden),
            }
        if (dense := modules.dense(module)) is not None:
            vectors = dict.fromkeys(_VECTORS, dense[:1])
            return {"a": (rank, dense[1]), "b": (dense[0], rank), **vectors}
        target = modules.find_target(module)
        rows, columns = (vocab, hidden) if target is None else (target.rows, target.columns)
        shapes: dict[str, tuple[int, ...]] = {"a": (rank, columns), "b": (rows, rank)}
        if target is not None and "." in target.slot:  # an expert
            return shapes | {"magnitude": (rows,)}
        shapes |= dict.fromkeys(_VECTORS, (rows,))
        return shapes | ({"table": (vocab, hidden)} if target is None else {})

    def check_complete(self, keys: Mapping[str, Key]) -> None:
        """Raise unless each module has both matrices, and with DoRA its magnitude."""
        if not keys:
            raise InvalidRequest(f"{WEIGHTS_FILE} holds no tensors.", param="path")
        kinds: dict[str, set[str]] = {}
        for key in keys.values():
            kinds.setdefault(key.module, set()).add(key.kind)
        for name, key in keys.items():
            has = kinds[key.module]
            for one, other in (("a", "b"), ("embedding_a", "embedding_b")):
                if (one in has) != (other in has):
                    raise tensor_error(name, f"has no partner: {one} and {other} go together")
            matrices = has & {"a", "embedding_a"}
            if has & {"b_bias", "magnitude"} and not matrices:
                raise tensor_error(name, "is of a module without matrices")
            if self._config.dora and matrices and "magnitude" not in has:
                raise tensor_error(name, "is of DoRA (use_dora), but its module has no magnitude")
            single = "tokens" in has or "embedding" in self._vocabulary.num_added
            if has >= {"embedding_a", "magnitude"} and single:
                raise tensor_error(name, "is of DoRA, but rows of single tokens stand beside it")


def _classifier_part(name: str, entry: Any, modules: TargetModules) -> str | None:
    """Return which tensor of a classifier's head this replaces; None if it replaces none."""
    part = name.removeprefix(PREFIX).replace(".modules_to_save.", ".")
    expected = modules.classifier.get(part)
    if expected is None:
        return None
    check_entry(name, entry)
    if (shape := tuple(entry.get_shape())) != expected:
        raise tensor_error(name, shape_error(shape, expected))
    return part


def _delta(adapter: LoRAAdapter, key: Key, modules: TargetModules) -> LoRALayer:
    if key.module == modules.embedding:
        adapter.embedding = adapter.embedding or LoRALayer()
        return adapter.embedding
    if modules.dense(key.module) is not None:
        return adapter.dense.setdefault(key.module, LoRALayer())
    if modules.find_target(key.module) is None:
        adapter.head = adapter.head or LoRALayer()
        return adapter.head
    return adapter.modules.setdefault(key.module, LoRALayer())


def _put(
    adapter: LoRAAdapter, key: Key, modules: TargetModules, tensor: Tensor, tokens: tuple[int, ...]
) -> None:
    """Add a tensor to the adapter. `tokens`: ids of its rows, if it is a part of a table."""
    delta = _delta(adapter, key, modules)
    which = "embedding" if key.module == modules.embedding else "head"
    if key.kind == "table":
        adapter.tables[which] = tensor
    elif key.kind == "tokens":
        ids, order = torch.tensor(tokens, dtype=torch.int64).sort()
        adapter.tokens[which] = ids, tensor[order]
    else:
        setattr(delta, key.kind.removeprefix("embedding_"), tensor)


def _add_tokens(adapter: LoRAAdapter, vocabulary: AdapterVocabulary) -> None:
    """Add the rows that follow the model's tables."""
    adapter.vocab_size = vocabulary.size
    if vocabulary.ties_lm_head and "embedding" in adapter.tables:
        adapter.tables["head"] = adapter.tables["embedding"]
        adapter.head = adapter.head or LoRALayer()
    for table, rows in vocabulary.num_added.items():
        if (current := adapter.tables.get(table)) is not None:
            adapter.tables[table] = torch.cat((current, rows.to(current.dtype)))
        elif (tokens := vocabulary.tokens(table, adapter.tokens.get(table))) is not None:
            adapter.tokens[table] = tokens
        if table == "embedding":
            adapter.embedding = adapter.embedding or LoRALayer()
        else:
            adapter.head = adapter.head or LoRALayer()
    # Matrices may lack vLLM's additional rows, which they then don't change.
    pad, inputs, outputs = torch.nn.functional.pad, adapter.embedding, adapter.head
    if inputs is not None and inputs.a is not None:
        inputs.a = pad(inputs.a, (0, vocabulary.embedding - inputs.a.shape[1]))
    if outputs is not None and outputs.b is not None:
        outputs.b = pad(outputs.b, (0, 0, 0, vocabulary.head - len(outputs.b)))
