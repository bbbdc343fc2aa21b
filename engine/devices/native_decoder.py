"""Native decoders for devices that compute them by other means than this engine's kernels."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.errors import ConfigError
from engine.model_loader.model_impl import BuildRequest, LoadedImpl, build_model, reject_ranks
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.registry import decoder_spec, has_native_decoder


def require_native_decoder(
    request: BuildRequest, device: str, unsupported_feature: Callable[[DecoderSpec], str]
) -> DecoderSpec:
    """The architecture of a checkpoint that a device of this name can run.

    Args:
        unsupported_feature: the first thing about an architecture that the device can't compute;
            "" for none.

    Raises `ConfigError` that names the architecture and what it has; nothing is loaded before.
    """
    reject_ranks(request, f"the device {device}")
    if request.config.model_impl == "transformers" or not has_native_decoder(request.raw):
        names = ", ".join(request.raw.get("architectures") or []) or "(none)"
        raise ConfigError(
            f"The device {device} runs models of the native decoder; {names} isn't one.",
            param="model",
        )
    spec = decoder_spec(request.raw)
    if feature := unsupported_feature(spec):
        raise ConfigError(
            f"{spec.architecture} has {feature}, which the device {device} doesn't run.",
            param="model",
        )
    return spec


def build_native_decoder(request: BuildRequest, device: str) -> tuple[LoadedImpl, NativeDecoder]:
    """The model of a checkpoint, with the weights that the request's kernels packed.

    Raises `ConfigError` for one that does more than generate text from text.
    """
    built = build_model(request)
    if type(built.model) is not NativeDecoder:
        raise ConfigError(
            f"The device {device} runs models that generate text from text; "
            f"{built.spec.architecture} runs as {type(built.model).__name__}.",
            param="model",
        )
    return built, built.model
