"""The compile worker: `python -m engine.structured_output.compile_worker`. Tries grammars, one
after the other.

Length-prefixed JSON frames on stdin and stdout; nothing else is shared with the engine, so it can
be killed at any moment. First frame: limits and vocabulary, answered with {"ready": true}. Then a
spec a frame, answered with {"grammar", "bytes"} or {"error"}.
"""

from __future__ import annotations

import json
import resource
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
from engine.system.worker_process import (
    limit_memory,
    open_worker_pipes,
    read_frame,
    resident_bytes,
    write_frame,
)

#: Less than the engine's own stack: what nests too deep for the engine dies here first.
STACK_BYTES = 4 * 2**20


def main() -> int:
    """Serve until stdin closes."""
    requests, answers = open_worker_pipes()
    hello = read_frame(requests)
    if hello is None:
        return 0
    settings = json.loads(hello)
    vocabulary = Vocabulary(
        settings["tokenizer"], settings["vocab_size"], tuple(settings["eos_token_ids"])
    )
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    try:
        tokenizer = load_tokenizer(vocabulary)
    except ValueError as error:
        _answer(answers, {"error": short(str(error))})
        return 1
    limit_memory(settings["memory_bytes"])
    _answer(answers, {"ready": True})
    while (spec := read_frame(requests)) is not None:
        previous_bytes = resident_bytes()
        try:
            grammar = grammar_text(spec, tokenizer)
            matcher = build(tokenizer, grammar)
        except (BadGrammar, ValueError) as error:
            _answer(answers, {"error": short(str(error))})
            continue
        grown = max(0, resident_bytes() - previous_bytes)
        del matcher
        _answer(answers, {"grammar": grammar, "bytes": grown})
    return 0


def _answer(stream: BinaryIO, message: dict[str, object]) -> None:
    write_frame(stream, json.dumps(message).encode())


if __name__ == "__main__":
    sys.exit(main())
