"""The JSON-Schema-Test-Suite (draft 2020-12) against the backend, without a model.

Each schema is compiled. One that is refused is counted as such. Under one that is accepted,
documents are made by random choices among the tokens that its mask allows, and each must validate;
and every document that the suite calls invalid must be impossible. `python -m
tests.engine.structured.conformance` prints the table of `docs/structured-output.md`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from engine.contract.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend_llguidance import (
    BadGrammar,
    Vocabulary,
    build,
    load_tokenizer,
)
from engine.structured_output.grammar_spec import grammar_text, make_grammar_spec
from engine.text.tokenizer import load_tokenizer as load_tokenizer_folder

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SUITE = Path(__file__).parent / "json_schema_suite" / "draft2020-12.json"
MODEL = Path(__file__).parents[3] / "demo" / "model"
DOCUMENTS = 4
#: From here on documents are steered to their end.
LONG = 40
MAX_TOKENS = 200


@dataclass(slots=True)
class Case:
    """A schema of the suite, with documents that it must accept or not."""

    keyword: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Unique in the suite."""
        return f"{self.keyword}: {self.description}"


@dataclass(slots=True)
class Result:
    """What became of a case.

    Attributes:
        refused: why the backend doesn't take the schema, None where it does.
        documents: made under it, whole.
        invalid: made, and wrong. accepted: called invalid by the suite, and possible all the same.
        impossible: called valid by the suite, but not reachable (another order of keys, say).
    """

    case: Case
    refused: str | None = None
    documents: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)


def cases() -> list[Case]:
    """The suite's schemas that are objects."""
    cases = [Case(**entry) for entry in json.loads(SUITE.read_text())]
    return [case for case in cases if isinstance(case.schema, dict)]


class Conformance:
    """Runs cases with one model's tokenizer."""

    def __init__(self, folder: Path = MODEL) -> None:
        tokenizer = load_tokenizer_folder(folder)
        self._eos = tokenizer.eos_token_id
        size = tokenizer.vocab_size
        self._tokenizer: LLTokenizer = load_tokenizer(
            Vocabulary(tokenizer.to_json(), size, (self._eos,))
        )
        self._row = np.zeros(-(-size // 32), dtype=np.int32)
        #: Tokens that bring a document nearer to its end.
        closing = {'"', "}", "]", '"}', '"]', "]}", "}}", "]]"}
        self._bonus = np.zeros(size)
        for token in range(size):
            text = tokenizer.decode([token], False)
            self._bonus[token] = 8.0 * (text in closing) - 0.2 * len(text)
        self._bonus[self._eos] = 20.0

    def run(self, case: Case, seed: int) -> Result:
        """Compile, make documents, try the suite's own."""
        result = Result(case)
        try:
            matcher = self._compile(case.schema)
        except (BadGrammar, ValueError) as error:
            result.refused = str(error)
            return result
        validator = jsonschema.Draft202012Validator(case.schema)
        for number in range(DOCUMENTS):
            text = self._document(matcher.deep_copy(), random.Random(seed * 100 + number))
            if text is None:
                continue
            result.documents.append(text)
            if not validator.is_valid(json.loads(text)):
                result.invalid.append(text)
        for test in case.tests:
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            if test["valid"] and not self._possible(matcher, text):
                result.impossible.append(text)
            elif not test["valid"] and self._possible(matcher, text):
                result.accepted.append(text)
        return result

    def _compile(self, schema: dict[str, Any]) -> LLMatcher:
        params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        text = grammar_text(make_grammar_spec(params).data, self._tokenizer)
        return build(self._tokenizer, text)

    def _document(self, matcher: LLMatcher, rng: random.Random) -> str | None:
        """A random document; None if it doesn't come to an end."""
        numbers = np.random.default_rng(rng.getrandbits(64))
        tokens: list[int] = []
        while not matcher.is_stopped():
            if len(tokens) == MAX_TOKENS:
                return None
            matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
            allowed = _bits(self._row, len(self._bonus))
            logits = numbers.normal(scale=3.0, size=len(allowed))
            if len(tokens) >= LONG:
                logits += self._bonus[allowed]
            token = int(allowed[logits.argmax()])
            if token == self._eos:
                break
            tokens.append(token)
            matcher.consume_tokens([token])
        return self._tokenizer.decode_bytes(tokens).decode()

    def _possible(self, matcher: LLMatcher, text: str) -> bool:
        """Whether the grammar lets this very text come out whole."""
        copy = matcher.deep_copy()
        tokens = self._tokenizer.tokenize_str(text)
        if copy.validate_tokens(tokens) < len(tokens):
            return False
        copy.consume_tokens(tokens)
        return bool(copy.is_accepting())


def _bits(row: NDArray[np.int32], size: int) -> NDArray[np.int64]:
    """The tokens whose bits are set."""
    flags = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
    return np.flatnonzero(flags)


def results() -> Iterator[Result]:
    """Of the whole suite."""
    conformance = Conformance()
    for seed, case in enumerate(cases()):
        yield conformance.run(case, seed)


def table(matches: list[Result]) -> str:
    """By the suite's keywords: schemas taken, and refused."""
    lines = ["| keyword | schemas accepted | refused |", "|---|---|---|"]
    for keyword in dict.fromkeys(result.case.keyword for result in matches):
        local_results = [result for result in matches if result.case.keyword == keyword]
        refused = sum(result.refused is not None for result in local_results)
        lines.append(f"| `{keyword}` | {len(local_results) - refused} | {refused} |")
    refused = sum(result.refused is not None for result in matches)
    lines.append(f"| together | {len(matches) - refused} | {refused} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(list(results())))
