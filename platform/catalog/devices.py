"""The GPUs of this machine, which its replicas take in turns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

#: Where NVIDIA's driver lists GPUs as `nvidia0` and so on.
DEVICE_FILES = Path("/dev")


def visible_devices() -> list[str]:
    """GPUs that replicas may use: those of `CUDA_VISIBLE_DEVICES`, or all of the machine."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(number) for number in range(len(list(DEVICE_FILES.glob("nvidia[0-9]*"))))]
    return [name.strip() for name in names.split(",") if name.strip()]


def device_environment(number: int, num_ranks: int, devices: Sequence[str]) -> dict[str, str]:
    """Environment that assigns a replica its devices, round-robin; {} if there is no choice.

    Args:
        number: the replica's; those of one model are numbered without gaps.
        num_ranks: number of devices that it uses.
    """
    if len(devices) <= num_ranks:
        return {}
    ranks = range(number * num_ranks, (number + 1) * num_ranks)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[rank % len(devices)] for rank in ranks)}
