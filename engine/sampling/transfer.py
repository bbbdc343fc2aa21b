"""Moving what the host has made to where the logits are."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The CPU tensor on the device, without waiting for the device.

    A copy starts from pinned pages, which torch keeps until it's done.
    """
    if device == tensor.device:
        return tensor
    pinned = tensor.pin_memory() if torch.accelerator.is_available() else tensor
    return pinned.to(device, non_blocking=True)
