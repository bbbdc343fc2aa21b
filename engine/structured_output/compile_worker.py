"""The compile worker: `python -m engine.structured_output.compile_worker`. Tries grammars, one
after the other.

Length-prefixed JSON frames on stdin and stdout; nothing else is shared with the engine, so it can
be killed at any moment. First frame: limits and vocabulary, answered with {"ready": true}. Then a
spec a frame, answered with {"grammar", "bytes"} or {"error"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from engine.structured_output.backend_llguidance import (
    BadGrammar,
    Vocabulary,
    build,
    load_tokenizer,
    short,
)
from engine.structured_output.grammar_spec import grammar_text

# -- Frames on a pipe: four bytes of length, little-endian, then the payload.


_HEAD = struct.Struct("<I")
MAX_FRAME = 256 * 2**20


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Write one frame. Raises OSError when the other side is gone."""
    view = memoryview(_HEAD.pack(len(payload)) + payload)
    while view:
        # An unbuffered pipe may take a part only.
        view = view[stream.write(view) :]
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the stream's end. Raises ValueError for a frame over MAX_FRAME."""
    head = _read_exactly(stream, _HEAD.size)
    if head is None:
        return None
    (length,) = _HEAD.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"A frame of {length} bytes is over the limit.")
    return _read_exactly(stream, length)


def _read_exactly(stream: BinaryIO, count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


#: Less than the engine's own stack: what nests too deep for the engine dies here first.
STACK_BYTES = 4 * 2**20


def main() -> int:
    """Serve until stdin closes."""
    _die_with_the_engine()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # The backend may print; that must not mix with the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = sys.stdin.buffer
    hello = read_frame(requests)
    if hello is None:
        return 0
    settings = json.loads(hello)
    vocabulary = Vocabulary(
        settings["tokenizer"], settings["vocab_size"], tuple(settings["eos_token_ids"])
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    try:
        tokenizer = load_tokenizer(vocabulary)
    except ValueError as error:
        _answer(answers, {"error": short(str(error))})
        return 1
    _limit_memory(settings["memory_bytes"])
    _answer(answers, {"ready": True})
    while (spec := read_frame(requests)) is not None:
        before = _resident_bytes()
        try:
            grammar = grammar_text(spec, tokenizer)
            matcher = build(tokenizer, grammar)
        except (BadGrammar, ValueError) as error:
            _answer(answers, {"error": short(str(error))})
            continue
        grown = max(0, _resident_bytes() - before)
        del matcher
        _answer(answers, {"grammar": grammar, "bytes": grown})
    return 0


def _die_with_the_engine() -> None:
    """A compilation in progress must not outlive a killed engine (Linux's PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _answer(stream: BinaryIO, message: dict[str, object]) -> None:
    write_frame(stream, json.dumps(message).encode())


def _limit_memory(more_bytes: int) -> None:
    """Allow the address space `more_bytes` on top of what it has now."""
    limit = _statm(0) + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident_bytes() -> int:
    return _statm(1)


def _statm(field: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
