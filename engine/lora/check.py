"""Checks an adapter against a model before any replica sees it, in a process of its own.

    python -m engine.lora.check --model FOLDER --adapter FOLDER [--probe] [--max-rank N]

prints one JSON object, `CheckResult`, on standard output; with `--probe` also the verdict without
it,
on a line before that, as soon as it is known. It exits with 0 where the adapter is sound,
with 1 where it isn't (`error` says why), and with 2 for wrong arguments. Weights are read as data
alone: nothing in an adapter's folder is ever run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# They stay: looking through them for garbage meanwhile takes a fifth of a short check.
if __name__ == "__main__":
    gc.disable()

import kernels
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import BadModelConfig, InvalidRequest, ModelLoadError, QuireError
from engine.contract.lora import tokenizer_files
from engine.lora.adapter import LoRAAdapter
from engine.lora.packing import modules_of
from engine.lora.parity_probe import ProbeResult, probe_adapter, probe_bridged
from engine.lora.reader import read_adapter
from engine.lora.target_modules import TargetModules
from engine.model_loader.loader import load_model, resolve_folder
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoders.encoder_spec import EncoderSpec
from engine.models.registry import decoder_spec, has_native_decoder, read_config
from engine.models.vision.family import VisionDecoder
from engine.pooling.load import head_shapes, pooled_spec
from engine.pooling.pooling_config import read_pooling_config
from engine.text.adapter_tokenizers import check_adapter_tokenizer
from engine.text.tokenizer import load_tokenizer
from engine.text.tokenizer_folder import tokenizer_folder


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """What was found.

    Attributes:
        ok: the adapter can be served with this model.
        error: why not: a `message` for people and the `param`, a field or a tensor, or null.
        digest: sha256 of its content; what it is known by from now on.
        rank: the largest of its modules.
        target_modules: the last words of the names of the modules that it changes.
        num_parameters, num_bytes: of its tensors.
        vocab_size: tokens that its requests may hold, where it brings some; 0: the model's.
        tokenizer: sha256 of the tokenizer that it brings; "" where the model's is used.
        probe: what came of the parity probe; None where nobody asked for it.
    """

    ok: bool = False
    error: dict[str, Any] | None = None
    digest: str = ""
    rank: int = 0
    target_modules: list[str] = field(default_factory=list)
    num_parameters: int = 0
    num_bytes: int = 0
    vocab_size: int = 0
    tokenizer: str = ""
    probe: ProbeResult | None = None


def check_adapter(
    model: str,
    folder: Path,
    max_rank: int | None = None,
    *,
    probe: bool = False,
    tell: Callable[[CheckResult], None] = lambda _: None,
) -> CheckResult:
    """The verdict on an adapter's folder for a model (a folder, or a GGUF file).

    `probe`: also run both, see `engine.lora.parity_probe`; an adapter that fails it isn't ok.
    `tell` hears
    the verdict before that.
    """
    try:
        config = EngineConfig(model=model, skip_tokenizer_init=True, dtype="float32")
        source = resolve_folder(config)
        described = _spec(config, source)
        loaded: Any = _loaded(config) if described is None else None
        modules = modules_of(loaded) if described is None else TargetModules(*described)
        adapter = read_adapter(folder, modules, max_rank)
        tokenizer = _tokenizer(folder, model, source)
        result = None
        if probe:
            tell(_verdict(adapter, tokenizer, None))
            if isinstance(loaded, VisionDecoder):  # of its text: no picture is probed
                result = probe_adapter(adapter, source, loaded.full_spec, config)
            elif described is None:
                result = probe_bridged(adapter, loaded, modules)
            else:
                result = probe_adapter(adapter, source, described[0], config)
    except QuireError as error:
        return CheckResult(error={"message": error.message, "param": error.param})
    return _verdict(adapter, tokenizer, result)


def _tokenizer(folder: Path, model: str, source: Path) -> str:
    """See `CheckResult.tokenizer`. Raises `ModelLoadError` for one that can't be used."""
    if not tokenizer_files(folder):
        return ""
    config = EngineConfig(model=model)
    return check_adapter_tokenizer(folder, load_tokenizer(tokenizer_folder(config, source)))


def _verdict(adapter: LoRAAdapter, tokenizer: str, probe: ProbeResult | None) -> CheckResult:
    passed = probe is None or probe.passed
    differ = None if probe is None else f"differ by {probe.max_difference:.2g} of the largest"
    return CheckResult(
        ok=passed,
        error=None if passed else {"message": f"Logits with the adapter {differ}.", "param": None},
        probe=probe,
        digest=adapter.digest,
        rank=adapter.rank,
        target_modules=adapter.target_modules,
        num_parameters=adapter.num_parameters,
        num_bytes=adapter.num_bytes,
        vocab_size=adapter.vocab_size,
        tokenizer=tokenizer,
    )


def _spec(
    config: EngineConfig, folder: Path
) -> tuple[DecoderSpec | EncoderSpec, dict[str, tuple[int, ...]]] | None:
    """The model's description, and the tensors of its classifier's head if it has one; None for one
    of the Transformers bridge.

    Raises `ModelLoadError` for what can't be read.
    """
    raw = read_config(folder)
    pooling = read_pooling_config(config, folder, raw)
    if pooling is not None:
        spec = pooled_spec(pooling, raw)
        return spec, head_shapes(pooling, spec, folder, config)
    if not has_native_decoder(raw):
        return None
    try:
        return decoder_spec(raw), {}
    except BadModelConfig:
        raise
    except ModelLoadError:  # a setting that only `transformers` does
        return None


def _loaded(config: EngineConfig) -> Any:
    """A model of the Transformers bridge, or with a vision tower, which has to be loaded to know
    what is in it.

    Raises `ModelLoadError` for what can't be read, `InvalidRequest` for a model without adapters.
    """
    model = load_model(config, kernels.get("cpu"), lambda done, total: None).model
    if not isinstance(model, VisionDecoder) and getattr(model, "adapted", None) is None:
        raise InvalidRequest(
            "Adapters are for models that run on Quire's own decoders and encoders or on the "
            f"Transformers bridge; {type(model).__name__} doesn't.",
            param="model",
        )
    return model


def _print(verdict: CheckResult) -> None:
    print(json.dumps(asdict(verdict)), flush=True)


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
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also compare what model and adapter say with what they say merged; loads the model",
    )
    args = parser.parse_args(argv)
    verdict = check_adapter(args.model, args.adapter, args.max_rank, probe=args.probe, tell=_print)
    _print(verdict)
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main())
