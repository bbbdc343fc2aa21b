"""Every reply of a rank is read, so that none is taken for the next command's."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from engine.executor.multiproc_executor import MultiprocExecutor
from engine.executor.uniproc_executor import UniProcExecutor


@pytest.mark.parametrize(("command", "argument"), [("sleep", 1), ("wake_up", ["weights"])])
def test_replies_are_read_where_the_first_rank_fails(
    command: str, argument: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor._ranks = ranks = Mock()
    monkeypatch.setattr(UniProcExecutor, command, Mock(side_effect=OSError("no memory")))
    with pytest.raises(OSError, match="no memory"):
        getattr(executor, command)(argument)
    ranks.collect.assert_called_once_with(command)
