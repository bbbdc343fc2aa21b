"""What torch does in vain for tests, of which some thousands have a tiny model each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def quicken() -> None:
    """For this process.

    For CUDA and XPU, where there are none, torch would note each seed, in case that they begin
    later, and beside it the stack of who called it: pytest's takes a millisecond to write out. And
    it would draw the first weights of layers on the meta device, which has none.
    """
    for device in (torch.cuda, torch.xpu):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    for kind in (nn.Linear, nn.Embedding):
        if not hasattr(kind.reset_parameters, "quick"):
            kind.reset_parameters = _where_weights_are(kind.reset_parameters)


def _where_weights_are(reset: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def call(self: nn.Module) -> None:
        if not self.weight.is_meta:
            reset(self)

    call.quick = True
    return call
