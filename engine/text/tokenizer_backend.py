"""The `tokenizers` library's object behind `Tokenizer`, validated and with special tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from engine.contract.errors import (
    ContextLengthExceeded,
    EngineFault,
    InvalidRequest,
    ModelLoadError,
)
from engine.text.tokenizer_files import (
    TokenizerSettings,
    parse_object,
    read_text,
    truncate_for_message,
)

TOKENIZER_FILE = "tokenizer.json"
#: Files that `engine.text.tokenizer_folder` can convert to a `tokenizer.json`.
CONVERTIBLE_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "qwen.tiktoken",
    "cl100k_base.tiktoken",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
_SUBWORD_PREFIX = re.compile(
    r'"continuing_subword_prefix"\s*:\s*"[^"]|\\u00[4-7]'  # or its name with escapes
)
#: Maximum ids relative to the number of tokens, and additional ones, as models may have gaps.
_SPARSE, _MAX_UNUSED = 4, 1 << 16
#: Longer texts (in characters) are tokenized without blocking other threads.
_LONG_CHARS = 4096
#: Maximum tokens of one text: no context is longer, and creating their list blocks other threads.
MAX_TOKENS = 1 << 20
#: A text with more characters per allowed token is counted in chunks first: few such texts fit, and
#: for ten megabytes at once the library allocates a gigabyte.
CHARS_A_TOKEN = 6
CHUNK_CHARS = 1 << 17
#: Upper bound of the tokens that a cut adds in what it splits: words have fewer characters.
_OF_A_CUT = 512
#: Rust's panics in Python: not an `Exception`, and of a class that can't be imported.
_PANIC = "PanicException"


def load_backend(folder: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Load the tokenizer in `folder`, without truncation or padding.

    Raises:
        ModelLoadError: the folder or `tokenizer.json` is missing, or isn't a tokenizer.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is no folder.")
    path = folder / TOKENIZER_FILE
    if not path.exists():
        convertible = [name for name in CONVERTIBLE_FILES if (folder / name).is_file()]
        hint = f" {convertible[0]} is there: it must be converted first." if convertible else ""
        raise ModelLoadError(f"{path} is missing.{hint}")
    text = read_text(path)
    _check_merges(text, path)
    with _naming(path, text):
        backend = tokenizers.Tokenizer.from_str(text)
        _check_ids(backend, path)
        backend = add_special_tokens(backend, settings)
        backend.encode("")  # validates the post-processor
        backend.decode([])  # detects decoders that panic on an empty text
        return backend


@contextmanager
def _naming(path: Path, text: str) -> Iterator[None]:
    """Convert the library's failures, unspecific exceptions and panics, to `ModelLoadError`."""
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException as error:
        if not _is_library_error(error):
            raise
        parse_object(text, path)
        raise ModelLoadError(f"{path} is no tokenizer: {truncate_for_message(error)}.") from error


def _is_library_error(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


def encode(
    backend: tokenizers.Tokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    offsets: bool = False,
) -> tokenizers.Encoding:
    """Tokenize a text, and return all that the library knows about its tokens.

    Args:
        offsets: whether the offsets of tokens in the text are needed.

    Raises: `InvalidRequest` if the tokenizer has no tokens for it; `ContextLengthExceeded` for more
        than `MAX_TOKENS`.
    """
    _check_beginning(backend, text)
    encoding = tokenize(backend, text, add_special_tokens=add_special_tokens, offsets=offsets)
    if len(encoding) > MAX_TOKENS:
        raise too_many_tokens_error(len(encoding))
    return encoding


def _check_beginning(backend: tokenizers.Tokenizer, text: str) -> None:
    """Raise `ContextLengthExceeded` for a text whose beginning already exceeds `MAX_TOKENS`.

    The rest isn't read. The text is read in chunks to limit memory; a cut changes only the tokens
    of what it splits.
    """
    size = CHARS_A_TOKEN * MAX_TOKENS + _OF_A_CUT
    if len(text) <= size:
        return
    count, step = 0, min(size, CHUNK_CHARS)
    for start in range(0, len(text), step):
        chunk = text[start : start + step]
        count += len(tokenize(backend, chunk, add_special_tokens=False, offsets=False)) - _OF_A_CUT
        if count > MAX_TOKENS:
            raise exceeds_limit_error(MAX_TOKENS, of_context=False)


def too_many_tokens_error(count: int) -> ContextLengthExceeded:
    """Return the error for a text of more than `MAX_TOKENS` tokens, with their exact number."""
    return ContextLengthExceeded(
        f"The text has {count} tokens; {MAX_TOKENS} are the most.", param="prompt"
    )


def exceeds_limit_error(limit: int, *, of_context: bool) -> ContextLengthExceeded:
    """Return the error for a text of over `limit` tokens whose number is unknown."""
    which = f"the model's context is {limit} tokens" if of_context else f"{limit} are the most"
    return ContextLengthExceeded(
        f"There are more than {limit} tokens in the prompt; {which}.", param="prompt"
    ).with_counts(limit + 1, limit)


def tokenize(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, offsets: bool
) -> tokenizers.Encoding:
    """Tokenize a text of any length. Raises `InvalidRequest` if that fails."""
    # The library holds the GIL during `encode`: seconds for a megabyte, in which no other thread
    # runs. It releases the GIL for a batch.
    batch = backend.encode_batch if offsets else backend.encode_batch_fast
    try:
        if len(text) > _LONG_CHARS:
            (encoding,) = batch([text], add_special_tokens=add_special_tokens)
        else:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not _is_library_error(error):
            raise
        raise InvalidRequest(
            f"The model's tokenizer can't read the text: {truncate_for_message(error)}.",
            param="prompt",
        ) from error
    return encoding


def decode(backend: tokenizers.Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of tokens. Raises `EngineFault` if the tokenizer's decoder fails."""
    try:
        text: str = backend.decode(ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:  # a decoder may panic, on some tokens only
        if not _is_library_error(error):
            raise
        raise EngineFault(
            f"The model's tokenizer can't decode its tokens: {truncate_for_message(error)}."
        ) from error
    return text


def _check_merges(text: str, path: Path) -> None:
    """Reject merges without the prefix that the library strips unchecked.

    If that splits a character, the library aborts the process.
    """
    if _SUBWORD_PREFIX.search(text) is None:
        return
    model = parse_object(text, path).get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[-1:]
        second = second[0] if isinstance(second, list) and second else second
        if isinstance(second, str) and not second.startswith(prefix):
            raise ModelLoadError(
                f"{path}: the merge {truncate_for_message(merge)} lacks continuing_subword_prefix "
                f"{truncate_for_message(prefix)}."
            )


def _check_ids(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Reject ids with such large gaps that lists of all lower ids would exhaust memory."""
    ids = backend.get_vocab().values()
    max_id = _SPARSE * len(ids) + _MAX_UNUSED
    if max(ids, default=0) > max_id:
        raise ModelLoadError(
            f"{path}: the largest id, {max(ids)}, is far beyond its {len(ids)} tokens."
        )


def add_special_tokens(
    backend: tokenizers.Tokenizer, settings: TokenizerSettings
) -> tokenizers.Tokenizer:
    """Add the settings' added and special tokens, and disable truncation and padding."""
    present = set(map(repr, backend.get_added_tokens_decoder().values()))
    new = [
        token for _, token in sorted(settings.added_tokens.items()) if repr(token) not in present
    ]
    if new:
        backend.add_tokens(new)
    existing = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = [existing.get(token.content, token) for token in settings.special_tokens]
    special = [token for token in special if token.content not in existing or not token.special]
    if special:
        backend.add_special_tokens(special)
    backend.no_truncation()
    backend.no_padding()
    return backend


def without_special_tokens(
    backend: tokenizers.Tokenizer, text_tokens: frozenset[str], *, inside: bool
) -> tokenizers.Tokenizer:
    """Return a copy for text in which control tokens are ordinary characters.

    Args:
        text_tokens: added tokens to encode as characters, besides special ones.
        inside: for text that doesn't start the prompt: it gets no prefix space if the original puts
            one before the very first word only.
    """
    data: dict[str, Any] = json.loads(backend.to_str())
    data["post_processor"] = None
    for token in data["added_tokens"]:
        if token["content"] in text_tokens:
            token["special"] = True
    if inside:
        _drop_first_prefix(data.get("pre_tokenizer"))
    copy = tokenizers.Tokenizer.from_str(json.dumps(data))
    copy.encode_special_tokens = True
    return copy


def _drop_first_prefix(pre_tokenizer: dict[str, Any] | None) -> None:
    """Change a Metaspace that prefixes only the first word into one that prefixes none."""
    if pre_tokenizer is None:
        return
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"


# Long texts are tokenized in chunks, with the same result as at once: for ten megabytes at once the
# library allocates a gigabyte. The next chunk starts at one of the last tokens of the previous one.
# Where both have the same tokens at the same positions, many in a row and far from both cuts, the
# cuts have no effect any more, and what follows is taken from the second chunk. Where they don't
# agree (a word without end) longer chunks are used.


#: Overlap of two chunks in characters. Tokens in its last eighth aren't trusted.
_COMMON = 4096
#: Minimum chunk in characters, however few tokens are useful.
_MIN_CHARS = 8192
#: Number of consecutive tokens that must agree.
_IN_A_ROW = 32


class _EncodedChunk:
    """Tokens of a text from `start` on, with their offsets."""

    def __init__(self, backend: tokenizers.Tokenizer, text: str, start: int, size: int) -> None:
        self.start, self.end = start, min(start + size, len(text))
        encoding = tokenize(backend, text[start : self.end], add_special_tokens=False, offsets=True)
        self.ids: list[int] = encoding.ids
        offsets = encoding.offsets
        self.starts = [start + begin for begin, _ in offsets]
        self._ends = [start + end for _, end in offsets]

    def begins_at(self, offset: int) -> int | None:
        """Return the first token that begins there or later, and doesn't split a character."""
        for index in range(bisect_left(self.starts, offset), len(self.ids)):
            if index and self.starts[index] >= self._ends[index - 1]:
                return index
        return None

    def joint(self, first: int, later: _EncodedChunk) -> tuple[int, int] | None:
        """Return from which token on (`first` or later) it agrees with the later chunk, as indices
        in both; None if that is too close to this chunk's end to be certain.
        """
        last = bisect_left(self._ends, self.end - (self.end - self.starts[first]) // 8)
        for index in range(first, last - _IN_A_ROW):
            other = bisect_left(later.starts, self.starts[index])
            mine, theirs = slice(index, index + _IN_A_ROW), slice(other, other + _IN_A_ROW)
            if (
                self.ids[mine] == later.ids[theirs]
                and self.starts[mine] == later.starts[theirs]
                and self._ends[mine] == later._ends[theirs]
            ):
                return index, other
        return None


def encode_ids(
    backend: tokenizers.Tokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    max_tokens: int | None = None,
) -> list[int]:
    """Return token ids of a text.

    Args:
        max_tokens: maximum useful length: a text that exceeds it before its end isn't read to its
            end. None: `MAX_TOKENS`.

    Raises: `InvalidRequest` if the tokenizer has no tokens for it; `ContextLengthExceeded` for more
        than `MAX_TOKENS`, and for a long text whose beginning exceeds `max_tokens`.
    """
    limit = MAX_TOKENS if max_tokens is None else max_tokens
    size = min(CHUNK_CHARS, max(_MIN_CHARS, CHARS_A_TOKEN * limit))
    if len(text) <= 2 * size:
        ids: list[int] = tokenize(
            backend, text, add_special_tokens=add_special_tokens, offsets=False
        ).ids
    else:
        ids = _encode_in_chunks(backend, text, size, max_tokens)
        ids = with_special_tokens(backend, ids) if add_special_tokens else ids
    if len(ids) > MAX_TOKENS:
        raise too_many_tokens_error(len(ids))
    return ids


def _encode_in_chunks(
    backend: tokenizers.Tokenizer, text: str, size: int, max_tokens: int | None
) -> list[int]:
    limit = MAX_TOKENS if max_tokens is None else max_tokens
    ids: list[int] = []
    chunk, num_used = _EncodedChunk(backend, text, 0, size), 0
    common, longer = min(_COMMON, size // 4), size
    while chunk.end < len(text):
        first = chunk.begins_at(chunk.end - common)
        later = None if first is None else _EncodedChunk(backend, text, chunk.starts[first], size)
        joint = None if first is None or later is None else chunk.joint(first, later)
        if joint is None or later is None:
            common, longer = 4 * common, 4 * longer
            chunk = _EncodedChunk(backend, text, chunk.start, longer)
            continue
        ids += chunk.ids[num_used : joint[0]]
        chunk, num_used = later, joint[1]
        common, longer = min(_COMMON, size // 4), size
        if len(ids) > limit:
            raise exceeds_limit_error(limit, of_context=max_tokens is not None)
    return ids + chunk.ids[num_used:]


def with_special_tokens(backend: tokenizers.Tokenizer, ids: list[int]) -> list[int]:
    """Return `ids` with the special tokens that the model expects around a text."""
    probe = tokenize(backend, "a", add_special_tokens=True, offsets=False)
    mask = probe.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return probe.ids[:first] + ids + probe.ids[last:]
