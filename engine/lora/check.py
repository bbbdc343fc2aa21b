"""Checks an adapter against a model before any replica sees it, in a process of its own.

    python -m engine.lora.check --model FOLDER --adapter FOLDER [--max-rank N]

prints one JSON object, `Verdict`, on standard output. It exits with 0 where the adapter is sound,
with 1 where it isn't (`error` says why), and with 2 for wrong arguments. Weights are read as data
alone: nothing in an adapter's folder is ever run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.contract.config import EngineConfig
from engine.contract.errors import InvalidRequest, QuireError
from engine.lora.adapter import Adapter
from engine.lora.modules import Modules
from engine.lora.read import read_adapter
from engine.model_loader.loader import resolve_folder
from engine.models.architectures import decoder_spec, is_known, read_config
from engine.models.spec import DecoderSpec
from engine.pooling.load import pooled_spec
from engine.pooling.settings import pooling_settings


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What was found.

    Attributes:
        ok: the adapter can be served with this model.
        error: why not: a `message` for people and the `param`, a field or a tensor, or null.
        digest: sha256 of its content; what it is known by from now on.
        rank: the largest of its modules.
        target_modules: the last words of the names of the modules that it changes.
        num_parameters, num_bytes: of its tensors.
    """

    ok: bool = False
    error: dict[str, Any] | None = None
    digest: str = ""
    rank: int = 0
    target_modules: list[str] = field(default_factory=list)
    num_parameters: int = 0
    num_bytes: int = 0


def check_adapter(model: str, folder: Path, max_rank: int | None = None) -> Verdict:
    """The verdict on an adapter's folder for a model (a folder, or a GGUF file)."""
    try:
        adapter = read_adapter(folder, Modules(_spec(model)), max_rank)
    except QuireError as error:
        return Verdict(error={"message": error.message, "param": error.param})
    return _passed(adapter)


def _passed(adapter: Adapter) -> Verdict:
    return Verdict(
        ok=True,
        digest=adapter.digest,
        rank=adapter.rank,
        target_modules=adapter.target_modules,
        num_parameters=adapter.num_parameters,
        num_bytes=adapter.num_bytes,
    )


def _spec(model: str) -> DecoderSpec:
    """The model's description, without its weights.

    Raises `ModelLoadError` for what can't be read, `InvalidRequest` for a model without adapters.
    """
    config = EngineConfig(model=model)
    folder = resolve_folder(config)
    raw = read_config(folder)
    pooling = pooling_settings(config, folder, raw)
    spec = None
    if pooling is not None:
        spec = pooled_spec(pooling, raw)
    elif is_known(raw):
        spec = decoder_spec(raw)
    if not isinstance(spec, DecoderSpec):
        names = ", ".join(raw.get("architectures") or ["this model"])
        raise InvalidRequest(f"Adapters of {names} aren't supported.", param="model")
    return spec


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.lora.check",
        description="Check a LoRA adapter against a model. Prints one JSON object.",
    )
    parser.add_argument("--model", required=True, help="the model's folder, hub id or GGUF file")
    parser.add_argument("--adapter", required=True, type=Path, help="the adapter's folder")
    parser.add_argument(
        "--max-rank", type=int, metavar="N", help="refuse ranks above this (default: any rank)"
    )
    args = parser.parse_args(argv)
    verdict = check_adapter(args.model, args.adapter, args.max_rank)
    print(json.dumps(asdict(verdict)))
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
