"""The JSON-Schema-Test-Suite: what the backend takes, it keeps; what it can't keep, it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.structured.conformance import Result, results, table

DOCS = Path(__file__).parents[3] / "docs" / "structured-output.md"


@pytest.fixture(scope="module")
def suite_results() -> list[Result]:
    return list(results())


@pytest.fixture(scope="module")
def accepted_results(suite_results: list[Result]) -> list[Result]:
    """Of the schemas that the backend takes."""
    return [result for result in suite_results if result.refused is None]


def test_every_document_that_is_made_validates(accepted_results: list[Result]) -> None:
    assert {result.case.name: result.invalid for result in accepted_results if result.invalid} == {}
    total = sum(len(result.documents) for result in accepted_results)
    assert total > 3.9 * len(accepted_results)
    assert all(result.documents for result in accepted_results)


def test_no_document_that_the_suite_calls_invalid_can_come(accepted_results: list[Result]) -> None:
    assert {
        result.case.name: result.accepted for result in accepted_results if result.accepted
    } == {}


def test_nearly_all_documents_that_the_suite_calls_valid_can_come(
    accepted_results: list[Result],
) -> None:
    valid = sum(test["valid"] for result in accepted_results for test in result.case.tests)
    impossible = sum(len(result.impossible) for result in accepted_results)
    assert valid > 200
    assert impossible < 0.1 * valid


def test_the_suite_is_there_and_much_of_it_is_taken(suite_results: list[Result]) -> None:
    assert len(suite_results) == 366
    assert sum(result.refused is None for result in suite_results) >= 160
    assert all(result.refused != "" for result in suite_results)


def test_the_table_in_the_docs_is_this_runs(suite_results: list[Result]) -> None:
    assert table(suite_results) in DOCS.read_text()
