"""Validates an adapter for a model in a separate process, before any replica loads it.

    python -m engine.lora.check --model FOLDER --adapter FOLDER [--probe] [--max-rank N]

prints one JSON object, `CheckResult`, to standard output; with `--probe` also the result without
it, on an earlier line, as soon as it is known. The exit status is 0 for a valid adapter, 1 for an
invalid one (`error` says why), and 2 for wrong arguments. Weights are read as data only: no code
in an adapter's folder is ever executed.
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

# These objects stay: scanning them for garbage takes a fifth of a short check.
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
    """The result of a check.

    Attributes:
        ok: whether the adapter can be served with this model.
        error: why not: a `message` for people and the `param`, a field or a tensor; or null.
        digest: sha256 of its content, which identifies it from now on.
        rank: maximum rank of its modules.
        target_modules: last components of the names of the modules that it changes.
        num_parameters, num_bytes: of its tensors.
        vocab_size: vocabulary of its requests if it adds tokens; 0: the model's.
        tokenizer: sha256 of its tokenizer; "" if it uses the model's.
        probe: result of the parity probe; None without one.
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
    """Check an adapter's folder for a model (a folder, or a GGUF file).

    `probe`: also run both, see `engine.lora.parity_probe`; an adapter that fails it isn't ok.
    `tell` is called with the result before that.
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
            if isinstance(loaded, VisionDecoder):  # only the text model is probed
                result = probe_adapter(adapter, source, loaded.full_spec, config)
            elif described is None:
                result = probe_bridged(adapter, loaded, modules)
            else:
                result = probe_adapter(adapter, source, described[0], config)
    except QuireError as error:
        return CheckResult(error={"message": error.message, "param": error.param})
    return _verdict(adapter, tokenizer, result)


def _tokenizer(folder: Path, model: str, source: Path) -> str:
    """See `CheckResult.tokenizer`. Raises `ModelLoadError` for an unusable one."""
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
    """Return the model's description, and the tensors of its classifier's head if it has one; None
    for a model of the Transformers bridge.

    Raises `ModelLoadError` for a model that can't be read.
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
    except ModelLoadError:  # supported by `transformers` only
        return None


def _loaded(config: EngineConfig) -> Any:
    """Load a model of the Transformers bridge or with a vision tower, as only loading determines
    its modules.

    Raises `ModelLoadError` for a model that can't be read, `InvalidRequest` for one that doesn't
    support adapters.
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
    """Run the command; return its exit status."""
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
