"""Threads for database work, and the time that slow work may take in one."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import connection

from common import db as db_threads
from common.db import run_in_db_thread, with_time_limit
from common.errors import QueryTimeout

#: Takes for ever.
ENDLESS = """
WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT 1 FROM numbers WHERE n = 1)
SELECT count(*) FROM numbers
"""


def run(statement: str) -> object:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()


@pytest.mark.database
async def test_fault_71_a_statement_that_takes_too_long_is_cut_off(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_threads, "REPORT_LIMIT_S", 0.1)
    with pytest.raises(QueryTimeout, match=r"longer than 0\.1 s") as refused:
        await run_in_db_thread(with_time_limit, partial(run, ENDLESS))
    assert (refused.value.status, refused.value.code) == (400, "query_timeout")
    # The threads and their connections go on, and no limit is left behind.
    for _ in range(4):
        assert await run_in_db_thread(with_time_limit, partial(run, "SELECT 1")) == (1,)
        if connection.vendor == "postgresql":
            assert await run_in_db_thread(run, "SHOW statement_timeout") == ("0",)
