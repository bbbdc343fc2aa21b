"""The JSON-Schema-Test-Suite: what the backend takes, it keeps; what it can't keep, it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.structured.conformance import Result, results, table

DOCS = Path(__file__).parents[3] / "docs" / "structured-output.md"


@pytest.fixture(scope="module")
def found() -> list[Result]:
    return list(results())


@pytest.fixture(scope="module")
def taken(found: list[Result]) -> list[Result]:
    """Of the schemas that the backend takes."""
    return [result for result in found if result.refused is None]


def test_every_document_that_is_made_validates(taken: list[Result]) -> None:
    assert {result.case.name: result.invalid for result in taken if result.invalid} == {}
    made = sum(len(result.documents) for result in taken)
    assert made > 3.9 * len(taken)
    assert all(result.documents for result in taken)


def test_no_document_that_the_suite_calls_invalid_can_come(taken: list[Result]) -> None:
    assert {result.case.name: result.accepted for result in taken if result.accepted} == {}


def test_nearly_all_documents_that_the_suite_calls_valid_can_come(taken: list[Result]) -> None:
    valid = sum(test["valid"] for result in taken for test in result.case.tests)
    impossible = sum(len(result.impossible) for result in taken)
    assert valid > 200
    assert impossible < 0.1 * valid


def test_the_suite_is_there_and_much_of_it_is_taken(found: list[Result]) -> None:
    assert len(found) == 366
    assert sum(result.refused is None for result in found) >= 160
    assert all(result.refused != "" for result in found)


def test_the_table_in_the_docs_is_this_runs(found: list[Result]) -> None:
    assert table(found) in DOCS.read_text()
