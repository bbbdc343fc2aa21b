"""`LoRARequest`: the adapter that a prompt goes through, as offline callers name it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.adapter_digests import known_digests
from engine.contract.adapters import AdapterRef
from engine.contract.checks import shown
from engine.contract.errors import InvalidRequest


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its folder.

    It is known by the content of its files: two requests for one content share it, whatever they
    are called, and files that have changed are another adapter.

    Attributes:
        lora_name: for messages and figures.
        lora_int_id: a number of the caller's, at least 1; nothing depends on it.
        lora_path: the folder with adapter_config.json and adapter_model.safetensors, or a file of
            GGUF. A tokenizer in it is that of the adapter's prompts and texts.
        load_inplace: files that have changed are always read anew, so this changes nothing.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for what can't be an adapter."""
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str | Path) or not str(value):
                raise InvalidRequest(f"{name} must be a text, got {shown(value)}.", param=name)
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequest(
                f"lora_int_id must be a whole number of at least 1, got {shown(number)}.",
                param="lora_int_id",
            )

    @property
    def name(self) -> str:
        """See `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """See `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """See `lora_path`."""
        return self.lora_path

    def ref(self) -> AdapterRef:
        """The adapter that its folder holds now.

        Raises `InvalidRequest` (param `lora_request`) where it holds none.
        """
        path = Path(self.lora_path).expanduser().absolute()
        try:
            digest, tokenizer = known_digests.of(path)
        except OSError as error:
            raise InvalidRequest(
                f"The adapter {self.lora_name!r} can't be read from {path}: {error.strerror}.",
                param="lora_request",
            ) from error
        return AdapterRef(digest=digest, name=self.lora_name, path=str(path), tokenizer=tokenizer)


def refs_of(given: Any, count: int) -> list[AdapterRef | None]:
    """The adapters of `count` prompts: of `LoRARequest`, one for all, one a prompt, or None.

    Raises `InvalidRequest` for anything else, and as `LoRARequest.ref`.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str)
    each = list(given) if several else [given] * count
    if len(each) != count:
        raise InvalidRequest(
            f"{count} prompts need as many lora_request, got {len(each)}.", param="lora_request"
        )
    return [_ref(one) for one in each]


def _ref(given: Any) -> AdapterRef | None:
    if given is None:
        return None
    if not isinstance(given, LoRARequest):
        raise InvalidRequest(
            f"lora_request must be a LoRARequest, got {shown(given)}.", param="lora_request"
        )
    return given.ref()
