"""The short training runs of what only guesses: a draft model, a head."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from demo.rows import Batch
from demo.train import BETAS, CLIP, schedule

#: Steps from one line of news to the next.
_TOLD = 25


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    *,
    steps: int,
    rate: float,
    warm_up: int,
) -> None:
    """Train all that can be trained of `model`, by AdamW, and print how it goes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
    rates = LambdaLR(optimizer, lambda step: schedule(step, steps, warm_up))
    started, losses = time.monotonic(), []
    for step, batch in zip(range(steps), batches):
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rates.step()
        losses.append(loss.item())
        if (step + 1) % _TOLD == 0:
            mean, seconds = sum(losses[-_TOLD:]) / _TOLD, time.monotonic() - started
            print(f"step {step + 1}/{steps} loss {mean:.4f} {seconds:.0f} s", flush=True)


def run(train: Callable[[Path, Path, int], None], steps: int, about: str) -> None:
    """The command line of a script: `train` gets the model's folder, the new one, and steps."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.model, options.out, options.steps)
