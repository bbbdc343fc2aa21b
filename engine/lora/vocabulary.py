"""Tokens that an adapter adds: rows after those of a model's tables, or tables of another size.

PEFT saves the complete table of a model that was resized, or with `trainable_token_indices` only
the new rows. vLLM's older layout has the new rows in a separate file, `new_embeddings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE, NEW_TOKENS, NEW_TOKENS_FILE
from engine.contract.validation import format_value
from engine.lora.adapter import TensorFile, check_entry, parse_key, tensor_error
from engine.lora.adapter_config import AdapterConfig
from engine.lora.target_modules import TargetModules

_TABLES = {"input_embeddings": "embedding", "output_embeddings": "head"}


@dataclass(frozen=True, slots=True)
class AdapterVocabulary:
    """Numbers of tokens in an adapter's tables.

    Attributes:
        model: rows of the model's tables.
        embedding, head: rows of the adapter's tables; the model's if it leaves one unchanged.
        num_added: number of rows to append to a table, by its name, in vLLM's layout.
        ties_lm_head: rows appended to the embedding apply to the output layer too, which is tied
            to it.
    """

    model: int
    embedding: int
    head: int
    num_added: Mapping[str, Tensor] = field(default_factory=dict)
    ties_lm_head: bool = False

    @property
    def size(self) -> int:
        """Vocabulary of the adapter's requests; 0: the model's."""
        return 0 if self.embedding == self.model else self.embedding

    def rows(self, table: str) -> int:
        """Return the rows of "embedding" or "head"."""
        return self.embedding if table == "embedding" else self.head

    def tokens(
        self, table: str, tokens: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return those of a table's rows of single tokens that are appended to it."""
        if (rows := self.num_added.get(table)) is None:
            return tokens
        ids = torch.arange(self.model, self.model + len(rows))
        if tokens is None:
            return ids, rows
        dtype = rows.dtype if tokens[1].dtype == rows.dtype else torch.float32
        return torch.cat((tokens[0], ids)), torch.cat((tokens[1].to(dtype), rows.to(dtype)))


def read_vocabulary(
    folder: Path, file: Any, config: AdapterConfig, modules: TargetModules
) -> AdapterVocabulary:
    """Read the adapter's vocabulary from its files' headers, and its new rows.

    `file`: its weights, opened by `safe_open`. Raises `InvalidRequest`, which names the tensor or
    the file, for tables that are inconsistent or that this model doesn't support.
    """
    vocab, new = modules.vocab_size, _read_new_tokens(folder, modules)
    sizes = {table: vocab + len(rows) for table, rows in new.items()}
    names = dict.fromkeys(sizes, NEW_TOKENS_FILE)
    for name, table, rows in _tables(file, modules):
        expected = vocab if table in new else sizes.setdefault(table, rows)
        if rows != expected:
            raise tensor_error(name, f"is for {rows} tokens, but {names[table]} for {expected}")
        names[table] = name
    for name, table, ids in _tokens(file, config, modules):
        table_size = vocab if table in new else sizes.get(table, 0)
        if table_size and max(ids) >= table_size:
            raise tensor_error(
                name, f"has a row of token {max(ids)}, but the table is for {table_size}"
            )
        if table not in sizes:
            sizes[table], names[table] = _rows_of(ids, vocab), name
    # As in PEFT, a table that replaces the embedding isn't tied to the output layer.
    apart = config.replaces(modules.embedding) or "modules_to_save" in names.get("embedding", "")
    ties = modules.tied and "embedding" in sizes and "head" not in sizes and not apart
    if ties and sizes["embedding"] != vocab:
        sizes["head"], names["head"] = sizes["embedding"], names["embedding"]
    embedding, head = (sizes.get(table, vocab) for table in ("embedding", "head"))
    is_resized = embedding != vocab or head != vocab
    source = names.get("head") or names.get("embedding", "")
    if is_resized and not modules.head:
        raise tensor_error(source, f"is for other tokens than the {vocab} of this model")
    if is_resized and (head > embedding or (head < embedding and "head" in sizes)):
        raise tensor_error(
            source,
            f"is for a vocabulary that doesn't fit: the embedding has {embedding} tokens, the "
            f"output layer {head}",
        )
    return AdapterVocabulary(vocab, embedding, head, new, ties and is_resized)


def _table_of(module: str, modules: TargetModules) -> str:
    """Return which table a module is, "": none."""
    name = modules.resolve(module)
    tables = {modules.embedding: "embedding", modules.head: "head"}
    return tables.get(name, "") if name else ""


def _tables(file: Any, modules: TargetModules) -> Iterator[tuple[str, str, int]]:
    """Return the tensors that replace a table: name, table, and number of rows."""
    for name in file.keys():  # noqa: SIM118
        key = parse_key(name)
        if key is not None and key.kind == "table" and (table := _table_of(key.module, modules)):
            shape = tuple(file.get_slice(name).get_shape())
            if len(shape) == 2 and shape[1] == modules.hidden_size:
                yield name, table, shape[0]


def _tokens(
    file: Any, config: AdapterConfig, modules: TargetModules
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Return the tensors that replace single rows of a table: name, table, and token ids."""
    for name in file.keys():  # noqa: SIM118
        key = parse_key(name)
        if key is None or key.kind != "tokens":
            continue
        ids, table = config.tokens_of(key.module), _table_of(key.module, modules)
        if ids and table:
            yield name, table, ids


def _rows_of(ids: tuple[int, ...], vocab: int) -> int:
    """Return the rows of a table with these tokens' rows. Raises `InvalidRequest` for gaps."""
    beyond = sorted(token for token in ids if token >= vocab)
    if beyond != list(range(vocab, vocab + len(beyond))):
        raise InvalidRequest(
            f"{CONFIG_FILE}: trainable_token_indices has token {beyond[-1]}, but not all of those "
            f"between it and the model's {vocab} tokens: nothing says what their rows are.",
            param="trainable_token_indices",
        )
    return vocab + len(beyond)


def _read_new_tokens(folder: Path, modules: TargetModules) -> dict[str, Tensor]:
    """Return the rows of vLLM's layout, by the name of the table that they are appended to."""
    for other in sorted(folder.glob(f"{NEW_TOKENS}*")):
        if other.name != NEW_TOKENS_FILE:
            raise InvalidRequest(
                f"{format_value(other.name)} can't be read: only {NEW_TOKENS_FILE} is.",
                param=other.name[:200],
            )
    path, tables = folder / NEW_TOKENS_FILE, {}
    if not path.is_file():
        return {}
    with _opened(path) as file:
        tensors = TensorFile(path, file)
        for name in file.keys():  # noqa: SIM118
            if name not in _TABLES:
                raise tensor_error(name, f"isn't one of {', '.join(_TABLES)}", NEW_TOKENS_FILE)
            check_entry(name, file.get_slice(name))
            shape = tuple(file.get_slice(name).get_shape())
            if len(shape) != 2 or shape[1] != modules.hidden_size or not shape[0]:
                raise tensor_error(
                    name,
                    f"has shape {list(shape)}, but it must be [tokens, {modules.hidden_size}]",
                    NEW_TOKENS_FILE,
                )
            tables[_TABLES[name]] = tensors.read(name)
    return tables


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(
            f"{path.name} isn't a valid safetensors file: {format_value(str(error))}.",
            param=path.name,
        ) from error
