"""PEFT as the oracle: it makes a random adapter, saves it, and says what comes of it.

It is imported where it's used: that takes seconds, in each process that collects tests.
"""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.engine.greedy import greedy_all
from tests.engine.models import read_model
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

PROMPT = [5, 9, 17, 33, 65, 129, 257, 11]


def checkpoint(recipe: str, folder: Path, **changes: Any) -> Path:
    """A tiny random model of a recipe of the survey."""
    make_checkpoint({**RECIPES[recipe], **changes}, folder)
    return folder


def prompts(count: int) -> list[list[int]]:
    """Different token ids, of different lengths."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 14, (count,), generator=generator).tolist()
    return [torch.randint(4, 384, (n,), generator=generator).tolist() for n in lengths]


def make_adapter(
    model: Path, folder: Path, seed: int = 0, more_tokens: int = 0, **options: Any
) -> Path:
    """A random adapter as PEFT saves it; its matrices are large enough to change what is said."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = _resized(model, more_tokens)
    options = {"r": 8, "lora_alpha": 12, "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
        _stir(adapted)
        save(adapted, folder)
    return folder


def save(adapted: Any, folder: Path) -> None:
    """As PEFT does, but without the page about it, which takes longer than all else."""
    adapted.create_or_update_model_card = lambda folder: None
    adapted.save_pretrained(folder)


def _resized(model: Path, more_tokens: int) -> Any:
    base: Any = copy.deepcopy(read_model(model))  # PEFT puts its own layers into it
    if more_tokens:
        size = base.config.vocab_size + more_tokens
        base.resize_token_embeddings(size, mean_resizing=False)
    return base


def _stir(adapted: torch.nn.Module) -> None:
    """What begins as zeros, ones or the base's own would go unnoticed where it's forgotten."""
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn_like(parameter)
        if "lora_" in name and "magnitude" not in name:
            parameter.data = noise * (0.3 if parameter.dim() == 1 else 0.15)
        else:
            parameter.data = parameter.data * (1 + 0.2 * noise) + 0.02 * noise


class PeftOracle:
    """The model with any number of adapters: float32, greedy."""

    def __init__(self, model: Path, adapters: dict[str, Path], more_tokens: int = 0) -> None:
        """`more_tokens`: so many more than the model's are what the adapters are for."""
        logging.getLogger("peft").setLevel(logging.ERROR)
        self._more_tokens = more_tokens
        self._model, self._adapters = model, adapters
        self._bases: dict[int, Any] = {}

    def greedy(self, prompt: list[int], count: int, adapter: str | None) -> list[int]:
        """Exactly `count` tokens, EOS ignored."""
        return self.greedy_all([(prompt, adapter)], count)[0]

    def greedy_all(
        self,
        pairs: list[tuple[list[int], str | None]],
        count: int,
        guesses: list[list[int]] | None = None,
    ) -> list[list[int]]:
        """Of each prompt with its adapter. `guesses`: see `tests.engine.greedy`."""
        by_index: dict[int, list[int]] = {}
        for adapter in dict.fromkeys(adapter for _, adapter in pairs):
            local_indexes = [index for index, (_, item) in enumerate(pairs) if item == adapter]
            tokens = greedy_all(
                self._load(adapter),
                [pairs[index][0] for index in local_indexes],
                count,
                [guesses[index] for index in local_indexes] if guesses else None,
            )
            by_index |= zip(local_indexes, tokens, strict=True)
        return [by_index[index] for index in range(len(pairs))]

    def _load(self, adapter: str | None) -> Any:
        from peft import PeftModel

        base = self._base(0 if adapter is None else self._more_tokens)
        if adapter is not None:
            base = copy.deepcopy(base)  # PEFT puts its own layers into it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                base = PeftModel.from_pretrained(base, self._adapters[adapter])
        return base.eval()

    def _base(self, more_tokens: int) -> Any:
        """The model with room for so many more tokens, read once."""
        if more_tokens not in self._bases:
            self._bases[more_tokens] = _resized(self._model, more_tokens)
        return self._bases[more_tokens]
