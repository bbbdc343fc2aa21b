"""Which CUDA graph serves which batch, and which modes are refused: plain Python, no GPU."""

from __future__ import annotations

import argparse
import logging

import pytest

from engine.contract.engine_config import EngineConfig, add_cli_args
from engine.contract.errors import ConfigError
from engine.worker.gpu.graph_dispatcher import (
    LEVELS,
    BatchDescriptor,
    CUDAGraphDispatcher,
    CUDAGraphMode,
    CUDAGraphRuntimeMode,
    capture_sizes,
    requested_mode,
    resolve_mode,
    sparse,
)
from kernels.attention import GraphSupport

FULL, PIECEWISE, NONE = (
    CUDAGraphRuntimeMode.FULL,
    CUDAGraphRuntimeMode.PIECEWISE,
    CUDAGraphRuntimeMode.NONE,
)
SIZES = [1, 2, 4, 8, 16]


def picked(mode: CUDAGraphMode, batch: tuple[int, int, int], query_len: int = 1, seqs: int = 8):
    return CUDAGraphDispatcher(mode, SIZES, seqs, query_len).dispatch(*batch)


@pytest.mark.parametrize(
    ("mode", "batch", "expected"),
    [
        # A decode batch of three is padded to four sequences.
        (CUDAGraphMode.FULL_AND_PIECEWISE, (3, 3, 1), (FULL, BatchDescriptor(4, 4, True))),
        (CUDAGraphMode.FULL_DECODE_ONLY, (3, 3, 1), (FULL, BatchDescriptor(4, 4, True))),
        (CUDAGraphMode.PIECEWISE, (3, 3, 1), (PIECEWISE, BatchDescriptor(4, 0, False))),
        # A decode batch uses the graph of any batch where there are only those.
        (CUDAGraphMode.FULL, (3, 3, 1), (FULL, BatchDescriptor(4, 4, False))),
        (CUDAGraphMode.NONE, (3, 3, 1), (NONE, BatchDescriptor(3, 3, True))),
        # A prompt of five tokens beside two decodes.
        (CUDAGraphMode.FULL_AND_PIECEWISE, (7, 3, 5), (PIECEWISE, BatchDescriptor(8, 0, False))),
        (CUDAGraphMode.FULL_DECODE_ONLY, (7, 3, 5), (NONE, BatchDescriptor(7, 3, False))),
        (CUDAGraphMode.FULL, (7, 3, 5), (FULL, BatchDescriptor(8, 8, False))),
        # More than was captured.
        (CUDAGraphMode.FULL_AND_PIECEWISE, (17, 3, 15), (NONE, BatchDescriptor(17, 3, False))),
        (CUDAGraphMode.FULL, (17, 3, 15), (NONE, BatchDescriptor(17, 3, False))),
        # One token of a prompt looks like a decode, and is one.
        (CUDAGraphMode.FULL_DECODE_ONLY, (1, 1, 1), (FULL, BatchDescriptor(1, 1, True))),
    ],
)
def test_dispatch(mode, batch, expected):
    assert picked(mode, batch) == expected


def test_speculative_decodes_are_uniform_too():
    dispatcher = CUDAGraphDispatcher(
        CUDAGraphMode.FULL_AND_PIECEWISE, [3, 6, 12, 24], 8, query_len=3
    )
    assert dispatcher.dispatch(9, 3, 3) == (FULL, BatchDescriptor(12, 4, True))
    assert dispatcher.dispatch(24, 8, 3) == (FULL, BatchDescriptor(24, 8, True))
    # A step without drafts, and one in which some rows have fewer.
    assert dispatcher.dispatch(3, 3, 1) == (FULL, BatchDescriptor(3, 3, True))
    assert dispatcher.dispatch(8, 8, 1) == (FULL, BatchDescriptor(12, 8, True))
    assert dispatcher.dispatch(4, 2, 3) == (PIECEWISE, BatchDescriptor(6, 0, False))
    assert dispatcher.dispatch(4, 2, 2) == (PIECEWISE, BatchDescriptor(6, 0, False))


def test_a_batch_of_all_sequences_is_padded_beyond_them():
    """Ten sequences at most, and no size between 8 and 16."""
    key = picked(CUDAGraphMode.FULL_DECODE_ONLY, (10, 10, 1), seqs=10)
    assert key == (FULL, BatchDescriptor(16, 10, True))


def test_a_graph_that_was_dropped_is_not_picked():
    dispatcher = CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 8)
    dispatcher.drop((FULL, BatchDescriptor(4, 4, True)))
    assert dispatcher.dispatch(3, 3, 1) == (FULL, BatchDescriptor(8, 8, True))
    dispatcher.drop((FULL, BatchDescriptor(8, 8, True)))
    assert dispatcher.dispatch(3, 3, 1) == (PIECEWISE, BatchDescriptor(4, 0, False))


def test_every_batch_fits_what_it_is_given():
    for mode in CUDAGraphMode:
        dispatcher = CUDAGraphDispatcher(mode, SIZES, 8)
        for reqs in range(1, 9):
            for tokens in range(reqs, 20):
                longest = tokens - reqs + 1
                runtime, sequence = dispatcher.dispatch(tokens, reqs, longest)
                assert sequence.num_tokens >= tokens
                assert runtime is not FULL or sequence.num_reqs >= reqs
                assert not sequence.uniform or longest == 1
                assert runtime is NONE or (runtime, sequence) in dispatcher.keys


def test_the_largest_graph_is_captured_first():
    sizes = [
        key[1].num_tokens
        for key in CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 8).keys
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert CUDAGraphDispatcher(CUDAGraphMode.NONE, SIZES, 8).keys == []


def test_sizes_follow_the_settings():
    assert capture_sizes(256, 8192)[:6] == [1, 2, 4, 8, 16, 24]
    assert capture_sizes(256, 8192)[-1] == 512
    assert capture_sizes(2, 8192) == [1, 2, 4]
    assert capture_sizes(256, 10) == [1, 2, 4, 8]
    assert {3, 6, 9, 18, 192, 384} < set(capture_sizes(64, 8192, query_len=3))
    assert set(capture_sizes(64, 8192)) < set(capture_sizes(64, 8192, query_len=3))


def test_an_operator_may_name_the_sizes():
    assert capture_sizes(4, 8192, requested_sizes=[64, 1, 8, 8]) == [1, 8, 64]
    assert capture_sizes(4, 32, requested_sizes=[64, 1, 8]) == [1, 8]
    assert capture_sizes(4, 8192, query_len=3, requested_sizes=[1, 4]) == [1, 3, 4, 6]


def test_a_batch_beyond_the_full_graphs_takes_pieces_that_hold_it():
    """The largest full graph is for 8 sequences; pieces go further."""
    dispatcher = CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 4, 8, 16, 32], 8)
    assert dispatcher.dispatch(8, 8, 1) == (FULL, BatchDescriptor(8, 8, True))
    assert dispatcher.dispatch(30, 8, 20) == (PIECEWISE, BatchDescriptor(32, 0, False))


@pytest.mark.parametrize(
    ("required", "support", "query_len", "expected"),
    [
        (CUDAGraphMode.FULL, GraphSupport.ALWAYS, 1, CUDAGraphMode.FULL),
        (CUDAGraphMode.FULL, GraphSupport.UNIFORM_BATCH, 1, CUDAGraphMode.FULL_AND_PIECEWISE),
        (CUDAGraphMode.FULL, GraphSupport.NEVER, 1, CUDAGraphMode.PIECEWISE),
        (
            CUDAGraphMode.FULL_AND_PIECEWISE, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1,
            CUDAGraphMode.FULL_AND_PIECEWISE,
        ),
        (
            CUDAGraphMode.FULL_AND_PIECEWISE, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, 3,
            CUDAGraphMode.PIECEWISE,
        ),
        (CUDAGraphMode.FULL_DECODE_ONLY, GraphSupport.NEVER, 1, CUDAGraphMode.PIECEWISE),
        (CUDAGraphMode.PIECEWISE, GraphSupport.NEVER, 1, CUDAGraphMode.PIECEWISE),
        (CUDAGraphMode.NONE, GraphSupport.NEVER, 1, CUDAGraphMode.NONE),
    ],
)  # fmt: skip
def test_a_mode_that_does_not_work_becomes_the_nearest(
    required, support, query_len, expected, caplog
):
    with caplog.at_level(logging.WARNING):
        assert resolve_mode(required, support, query_len) is expected
    assert bool(caplog.records) == (required is not expected)


def test_a_model_that_cannot_be_captured_runs_eagerly(caplog):
    with caplog.at_level(logging.WARNING):
        mode = resolve_mode(
            CUDAGraphMode.FULL, GraphSupport.ALWAYS, obstacle="it waits for the device"
        )
    assert mode is CUDAGraphMode.NONE
    assert "it waits for the device" in caplog.text


def test_settings_in_order():
    assert requested_mode(None, 2, False) is CUDAGraphMode.FULL_AND_PIECEWISE
    assert requested_mode("FULL", 1, False) is CUDAGraphMode.FULL
    assert requested_mode("FULL", 3, True) is CUDAGraphMode.NONE
    assert list(LEVELS.values()) == [
        CUDAGraphMode.NONE,
        CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL_AND_PIECEWISE,
        CUDAGraphMode.FULL_AND_PIECEWISE,
    ]


@pytest.mark.parametrize("flags", [["-O1"], ["-O", "1"], ["--optimization-level", "1"]])
def test_levels_have_a_short_flag(flags):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    assert EngineConfig.from_cli_args(parser.parse_args(flags)).optimization_level == 1


def test_a_mode_that_is_named_wins_over_the_level():
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    words = ["-O0", "--cudagraph-mode", "FULL", "--cudagraph-capture-sizes", "1", "2", "8"]
    config = EngineConfig.from_cli_args(parser.parse_args(words))
    expected = requested_mode(
        config.cudagraph_mode, config.optimization_level, config.enforce_eager
    )
    assert expected is CUDAGraphMode.FULL
    assert config.cudagraph_capture_sizes == [1, 2, 8]


@pytest.mark.parametrize("sizes", [[], [0], [-1], [1.5], [True], ["8"], [10**9], 8])
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", cudagraph_capture_sizes=sizes)
    assert caught.value.param == "cudagraph_capture_sizes"


def test_batches_with_adapters_have_graphs_of_their_own_of_fewer_sizes():
    sizes = capture_sizes(256, 8192)
    assert sparse(sizes) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    baseline = CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, sizes, 256)
    dispatcher = CUDAGraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, sizes, 256, adapted=True)
    assert [key for key in dispatcher.keys if not key[1].adapted] == baseline.keys
    assert len(dispatcher.keys) == len(baseline.keys) + 10 + 9
    for batch, expected in (
        ((3, 3, 1), (FULL, BatchDescriptor(4, 4, True, True))),
        ((100, 100, 1), (FULL, BatchDescriptor(128, 128, True, True))),
        ((100, 3, 60), (PIECEWISE, BatchDescriptor(128, 0, False, True))),
        ((600, 3, 500), (NONE, BatchDescriptor(600, 3, False, True))),
    ):
        assert dispatcher.dispatch(*batch, adapted=True) == expected
    assert dispatcher.dispatch(3, 3, 1) == baseline.dispatch(3, 3, 1)
    assert baseline.dispatch(3, 3, 1, adapted=True)[0] is NONE


def test_drafts_of_adapters_have_graphs_too():
    sizes = capture_sizes(64, 8192, query_len=9)
    dispatcher = CUDAGraphDispatcher(
        CUDAGraphMode.FULL_AND_PIECEWISE, sizes, 64, query_len=9, adapted=True
    )  # fmt: skip
    assert all(size % 9 == 0 for size in sparse(sizes, 9))
    for reqs in (1, 2, 7, 30, 56):
        mode, sequence = dispatcher.dispatch(9 * reqs, reqs, 9, adapted=True)
        assert mode is FULL
        assert sequence.adapted
        assert sequence.num_tokens % 9 == 0
        assert reqs <= sequence.num_reqs <= sequence.num_tokens // 9
