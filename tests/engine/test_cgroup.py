"""Limits of control groups: memory for the KV cache, CPU time for threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.contract.engine_config import EngineConfig
from engine.devices import host_memory as memory
from engine.devices import threads as engine_threads
from engine.devices.threads import Threads
from engine.system import host as cgroup
from kernels.reference import ReferenceKernels

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys/fs/cgroup of a process that is in the group /a/b."""
    (tmp_path / "self").write_text("5:memory:/m\n3:cpu,cpuacct:/c\n0::/a/b\n")
    (tmp_path / "fs" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "fs")
    return tmp_path / "fs"


def write_cgroup(folder: Path, **files: object) -> None:
    """Files of a group, their dots written as two underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_limits_there_are_none(root: Path) -> None:
    write_cgroup(root, memory__max="max", memory__current=5, cpu__max="max 100000")
    assert cgroup.available_cgroup_memory() is None
    assert cgroup.cpu_quota() is None
    assert cgroup.num_usable_cpus(7) == 7


def test_the_tightest_group_on_the_way_counts(root: Path) -> None:
    write_cgroup(root / "a", memory__max=2 * GIB, memory__current=GIB, cpu__max="150000 100000")
    write_cgroup(
        root / "a" / "b", memory__max=8 * GIB, memory__current=GIB, cpu__max="400000 100000"
    )
    assert cgroup.available_cgroup_memory() == GIB
    assert cgroup.cpu_quota() == 1.5
    assert [cgroup.num_usable_cpus(count) for count in (1, 2, 8)] == [1, 2, 2]


def test_file_pages_can_be_dropped(root: Path) -> None:
    """A checkpoint that was read fills the group with pages that cost nobody anything."""
    write_cgroup(root, memory__max=4 * GIB, memory__current=4 * GIB)
    write_cgroup(root, memory__stat=f"anon {GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}")
    assert cgroup.available_cgroup_memory() == 3 * GIB


def test_a_group_that_is_full_has_nothing_left(root: Path) -> None:
    write_cgroup(root, memory__max=GIB, memory__current=2 * GIB)
    assert cgroup.available_cgroup_memory() == 0


def test_version_1(root: Path) -> None:
    write_cgroup(
        root / "memory" / "m", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=2 * GIB
    )
    write_cgroup(root / "memory" / "m", memory__stat=f"total_inactive_file {GIB}\ninactive_file 7")
    write_cgroup(root / "cpu" / "c", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    write_cgroup(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert cgroup.available_cgroup_memory() == 2 * GIB
    assert cgroup.cpu_quota() == 0.5
    assert cgroup.num_usable_cpus(4) == 1


def test_a_group_that_is_not_mounted_is_the_root(root: Path) -> None:
    (root.parent / "self").write_text("0::/docker/0123\n")
    write_cgroup(root, cpu__max="300000 100000")
    assert cgroup.cpu_quota() == 3.0


def test_files_that_say_nothing_sensible_set_no_limit(root: Path) -> None:
    write_cgroup(root, cpu__max="0 0", memory__max="lots", memory__current="x")
    assert cgroup.cpu_quota() is cgroup.available_cgroup_memory() is None
    (root.parent / "self").write_bytes(b"\xff\xfe")
    assert cgroup.cpu_quota() is None


def test_the_kv_cache_stays_within_the_limit(root: Path) -> None:
    write_cgroup(root, memory__max=64 << 20, memory__current=0)
    assert memory.available_memory() == 64 << 20
    blocks = memory.num_cpu_blocks(EngineConfig(model="m", block_size=16), 1024, 10_000)
    assert blocks == (16 << 20) // (1024 * 16)


def test_threads_stay_within_the_quota_unless_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cgroup(root, cpu__max="200000 100000")
    monkeypatch.setattr(engine_threads, "_initial_count", 16)
    assert Threads.from_config(EngineConfig(model="m"), ReferenceKernels()).count == 2
    assert (
        Threads.from_config(EngineConfig(model="m", num_threads=5), ReferenceKernels()).count == 5
    )


def test_a_second_engine_starts_from_torchs_initial_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_threads, "_initial_count", None)
    monkeypatch.setattr(engine_threads, "num_usable_cpus", lambda count: count)
    initial_num_threads = torch.get_num_threads()
    try:
        Threads(initial_num_threads + 3).use(ReferenceKernels())
        assert (
            Threads.from_config(EngineConfig(model="m"), ReferenceKernels()).count
            == initial_num_threads
        )
    finally:
        torch.set_num_threads(initial_num_threads)


def test_a_successor_has_as_large_a_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 20)
    config = EngineConfig(model="m")
    assert memory.num_cpu_blocks(config, 1024, 1024) == (1 << 10) // config.block_size
    monkeypatch.setenv(cgroup.PREDECESSOR_VARIABLE, str(3 << 10))
    assert memory.num_cpu_blocks(config, 1024, 1024) == (3 << 10) // config.block_size
    monkeypatch.setenv(cgroup.PREDECESSOR_VARIABLE, "16")  # its sequences were shorter
    assert memory.num_cpu_blocks(config, 1024, 1024) == (1 << 10) // config.block_size
    monkeypatch.setenv(cgroup.PREDECESSOR_VARIABLE, str(3 << 10))
    limited = EngineConfig(model="m", cpu_kvcache_space=2 / 1024)
    assert memory.num_cpu_blocks(limited, 1024, 1024) == (2 << 10) // limited.block_size
