"""Words that identifiers must not contain, and replacements: `python -m tools.names`.

A word counts as a whole identifier and as its first or last part: `found`, `found_key`,
`key_found`. Only definitions are checked: functions, classes, parameters, variables, attributes;
of the console's scripts all names but properties. A test's name is a sentence, which may have any
word.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "platform/console/static/console/js"
PACKAGES = (
    "platform",
    "inference",
    "engine",
    "kernels",
    "quire",
    "tools",
    "benchmarks",
    "chaos",
    "tests",
)

#: Word -> replacements.
WORDS = {
    "alone": "isolated_, exclusive_",
    "at": "index, offset, key",
    "before": "previous_",
    "begun": "started, in_progress",
    "behind": "suffix, after_",
    "beside": "extra_, concurrent_, other_",
    "each": "the singular noun",
    "ended": "finished",
    "found": "what it is: key, rows, match",
    "fresh": "new_",
    "given": "value, argument",
    "held": "owned, allocated, in_flight",
    "here": "local_",
    "kept": "stored_, retained_, cached_",
    "known": "registered_, cached_, supported_",
    "least": "min_",
    "left": "remaining_",
    "lone": "isolated_, exclusive_",
    "look": "scan, probe, lookup",
    "looks": "scans, probes, lookups",
    "made": "built_, created_, result",
    "most": "max_",
    "nobody": "unowned_, default_",
    "note": "record, observe, update",
    "others": "other_ and the noun, remote_",
    "over": "exceeding_, total_",
    "own": "local_, tenant_, or the noun alone",
    "piece": "chunk, row_slice",
    "pieces": "chunks, row_slices",
    "place": "index, position, slot",
    "places": "indexes, positions, slots",
    "plain": "default_, unquantized_, dense_",
    "put": "set, write, store",
    "resting": "skipped",
    "room": "budget, capacity",
    "said": "reported_, output",
    "shown": "visible_, formatted",
    "take": "pop, acquire",
    "taken": "used_, consumed_",
    "there": "present, available",
    "told": "reported_, settings",
    "wanted": "requested_, required_",
    "whole": "full_, total_",
    "wrong": "invalid_, error",
}
#: Allowed as a part of a name: `created_at`.
STANDALONE = frozenset({"at"})
#: Allowed phrases, in which the words have another meaning.
PHRASES = (
    "not_found",
    "look_up",
    "take_over",
    "taken_over",
    "fail_over",
    "take_offline",
    "in_place",
    "client_left",
    "plain_text",
)

#: `identifier` or `path:identifier` -> why it may stay.
ALLOWED = {
    "inference/api/tokens.py:reasoning_ended": "a JSON field of the API",
    "inference/schemas/objects.py:ended_at": "a JSON field of the API",
    "put": "method of an HTTP view, and of a queue",
    "engine/contract/engine_config.py:kept_seats_fraction": "a setting",
    "engine/contract/messages.py:behind": "a field of a message",
    "engine/contract/messages.py:held": "a field of a message",
    "engine/contract/messages.py:num_ahead_own": "a field of a message",
    "engine/contract/replica_state.py:at": "a field of a message",
    "engine/contract/replica_state.py:held": "a field of a message",
    "engine/contract/replica_state.py:whole": "a field of a message",
    "engine/scheduler/scheduler.py:behind": "a field of a message",
    "engine/scheduler/scheduler.py:num_ahead_own": "a field of a message",
    "engine/text/jinja_sandbox.py:left": "jinja2's parameter",
    "BYTE_PIECE": "SentencePiece's word",
    "id_to_piece": "SentencePiece's word",
    "piece_to_id": "SentencePiece's word",
    "engine/text/tokenizer.py:piece": "SentencePiece's word",
    "engine/text/vocabulary.py:piece": "SentencePiece's word",
    "connection_made": "asyncio's protocol",
    "note_step": "method of devices, which plug-ins override",
    "kernels/cpu/step.py:most": "a field of a C struct",
    "platform/catalog/replica_log.py:at": "a JSON field of the API",
    "platform/management_api/adapters.py:piece": "an operation's name in the API",
    "platform/management_api/observability.py:before": "a query parameter of the API",
    "platform/management_api/people.py:before": "a query parameter of the API",
    "platform/management_api/served_models.py:at": "a JSON field of the API",
    "platform/management_api/served_models.py:room": "a JSON field of the API",
    "platform/management_api/served_models.py:there": "a JSON field of the API",
    "platform/metering/models.py:at": "a column",
    "platform/metering/open_requests.py:known": "a field of a stored message",
    "platform/metering/open_requests.py:most": "a field of a stored message",
    "platform/metering/request_log.py:ahead_own": "a JSON field of the API",
    "platform/metering/request_log.py:at": "a JSON field of the API",
    "platform/metering/request_log.py:behind": "a JSON field of the API",
    "platform/storage/playground_document.py:at": "a JSON field of stored documents",
    "platform/storage/playground_document.py:beside": "a JSON field of stored documents",
    "platform/tenants/models.py:at": "a column",
    "tests/inference/test_crash_attribution.py:held": "a field of a message",
    "tests/kernels/attention/test_backends.py:window_left": "flashinfer's parameter",
    "tests/platform/test_audit_retention.py:at": "a column",
}


#: What holds no names: regular expressions, comments, strings.
_JS_TEXT = re.compile(
    r"(?:(?<=[=(,:] )|(?<=\())/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/"
    r"|//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`(?:\\.|[^`\\])*`",
    re.DOTALL,
)
#: A name that follows no dot, so isn't a property, and no colon follows, so isn't a key.
_JS_NAME = re.compile(r"(?:(?<![.\w$])|(?<=\.\.\.))#?([A-Za-z_$][\w$]*)(?![\w$]|\s*:)")


def find_word(name: str) -> str | None:
    """Return the word that the identifier should not contain, or None."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    parts = re.sub("|".join(PHRASES), "phrase", snake).split("_")
    for word in (parts[0], parts[-1]):
        if word in WORDS and (word not in STANDALONE or len(parts) == 1):
            return word
    return None


def definitions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each identifier that a module defines, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


def script_names(source: str) -> Iterator[tuple[str, int]]:
    """Yield the names in a JavaScript module, and their lines."""
    code = _JS_TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    for number, line in enumerate(code.split("\n"), 1):
        for match in _JS_NAME.finditer(line):
            yield match[1], number


def main() -> int:
    """Print the identifiers that have such a word; the exit status is 1 if there are any."""
    status = 0
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if {"migrations", "node_modules"} & set(path.parts):
            continue
        file = path.relative_to(ROOT).as_posix()
        for name, line in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            word = find_word(name)
            if file.startswith("tests/") and name.startswith("test_"):
                continue
            if word and ALLOWED.keys().isdisjoint((name.strip("_"), f"{file}:{name}")):
                print(f"{file}:{line}: {name}: write {WORDS[word]}")
                status = 1
    for path in sorted(SCRIPTS.rglob("*.js")):
        for name, line in script_names(path.read_text(encoding="utf-8")):
            if word := find_word(name):
                print(f"{path.relative_to(ROOT)}:{line}: {name}: write {WORDS[word]}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
