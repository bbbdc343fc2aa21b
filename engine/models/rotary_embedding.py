"""Rotary position embedding: the cos/sin table with the scalings of all supported checkpoints.

Sources: Su et al., RoFormer (arXiv 2104.09864); position interpolation (2306.15595); NTK-aware
"dynamic" scaling; YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1's piecewise scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.contract.errors import BadModelConfig, ModelLoadError

_POSITIVE = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "attention_factor",
)  # fmt: skip
"""Parameters of scalings that must be above 0."""
_MAX_NUMBER = 1 << 31
_MAX_TABLE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding settings in `config.json`.

    Attributes:
        theta: the base.
        dim: the number of a head's dimensions that are rotated (even).
        kind: "default", "linear", "dynamic", "llama3", "yarn" or "longrope".
        params: the scaling's parameters (`factor`, ...).
        max_position_embeddings: the number of positions that the checkpoint was made for.
        planes: by frequency, the index of the position that rotates it, of a token's three (time,
            height, width; M-RoPE, arXiv 2409.12191); () if a token has one position.
    """

    theta: float
    dim: int
    kind: str = "default"
    params: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 2048
    planes: tuple[int, ...] = ()


#: Maximum number of a step's tokens with three positions; see `rotate_in_planes`.
MAX_PLANE_ROWS = 8192


def rotate_in_planes(table: Tensor, planes: Tensor, positions: Tensor) -> None:
    """Write the rotations of tokens with three positions into the last rows of a table.

    Kernels, which support one position per token, are then given the row's index.

    Args:
        table: float32 [max_positions + MAX_PLANE_ROWS, dim].
        planes: int64 [dim / 2], see `RopeSpec`.
        positions: int64 [n, 3], n <= MAX_PLANE_ROWS.
    """
    half = table.shape[1] // 2
    first = len(table) - MAX_PLANE_ROWS
    rows, columns = positions[:, planes], torch.arange(half, device=table.device)
    rotations = torch.cat((table[rows, columns], table[rows, half + columns]), dim=-1)
    table[first : first + len(positions)] = rotations


def rope_spec(config: dict[str, Any], dim: int, layer_type: str | None = None) -> RopeSpec:
    """Read `rope_parameters` (or the older `rope_theta` and `rope_scaling`) from a config.json."""
    rope_parameters = config.get("rope_parameters") or {}
    if layer_type is not None and isinstance(rope_parameters.get(layer_type), dict):
        rope_parameters = rope_parameters[layer_type]
    params = {**rope_parameters, **(config.get("rope_scaling") or {})}
    kind = str(params.pop("rope_type", None) or params.pop("type", None) or "default")
    params.pop("type", None)
    theta = float(params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind not in _INVERSE_FREQUENCIES:
        raise ModelLoadError(f"config.json: rope_type {kind!r} isn't known.", param="rope_type")
    _check_numbers(params)
    if "original_max_position_embeddings" not in params and (
        original := config.get("original_max_position_embeddings")
    ):
        params["original_max_position_embeddings"] = original
    planes = _planes(params, dim) if params.get("mrope_section") else ()
    max_positions = int(config.get("max_position_embeddings", 2048))
    return RopeSpec(theta, dim, kind, params, max_positions, planes)


def _planes(params: dict[str, Any], dim: int) -> tuple[int, ...]:
    """Read M-RoPE's planes. Raises `ModelLoadError` for sections that don't add up."""
    sections = params.pop("mrope_section")
    if not isinstance(sections, list | tuple) or len(sections) != 3 or sum(sections) != dim // 2:
        raise BadModelConfig(
            f"config.json: mrope_section must be three numbers that add up to {dim // 2}, got "
            f"{sections!r}.",
            param="mrope_section",
        )
    if not params.pop("mrope_interleaved", False):
        return tuple(plane for plane, count in enumerate(sections) for _ in range(count))
    # Time, height and width alternate; the remaining dimensions belong to time.
    return tuple(index % 3 if index < 3 * sections[index % 3] else 0 for index in range(dim // 2))


def cos_sin_table(spec: RopeSpec, max_positions: int, device: str = "cpu") -> Tensor:
    """Return float32 [max_positions, dim]: cosines in the first half, sines in the second.

    Raises `ModelLoadError` if a parameter of the scaling is missing or invalid, and for a table of
    more than 1 GiB.
    """
    if max_positions * spec.dim * 4 > _MAX_TABLE_BYTES:
        raise ModelLoadError(
            f"max_model_len is {max_positions}: name a smaller one, cosines and sines of that many "
            "positions take over a GiB.",
            param="max_model_len",
        )
    try:
        inverse, magnitude = _INVERSE_FREQUENCIES[spec.kind](spec, max_positions)
    except KeyError as error:
        raise ModelLoadError(
            f"config.json: rope scaling {spec.kind!r} needs {error.args[0]!r}.",
            param="rope_scaling",
        ) from error
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise _unsupported_scaling(spec) from error
    valid = inverse.shape == (spec.dim // 2,) and torch.isfinite(inverse).all()
    if not (valid and math.isfinite(magnitude)):
        raise _unsupported_scaling(spec)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude
    return table.to(device)


def _unsupported_scaling(spec: RopeSpec) -> ModelLoadError:
    """Return the error for a scaling that can't be computed."""
    scalars = {name: value for name, value in spec.params.items() if not isinstance(value, list)}
    return ModelLoadError(
        f"config.json: rope scaling {spec.kind!r} with theta {spec.theta} and {scalars} has no "
        f"frequencies for {spec.dim} dimensions.",
        param="rope_scaling",
    )


def _check_numbers(params: dict[str, Any]) -> None:
    """Raise `ModelLoadError` for a scaling's parameter that isn't a positive number."""
    for name in _POSITIVE:
        value = params.get(name)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < _MAX_NUMBER:
            raise BadModelConfig(
                f"config.json: rope scaling's {name} must be a number above 0, got {value!r}.",
                param="rope_scaling",
            )


def _inverse_frequencies(theta: float, dim: int) -> Tensor:
    """Return inverse frequencies without scaling: float32 [dim / 2]."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    return _inverse_frequencies(spec.theta, spec.dim), 1.0


def _linear(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    return _inverse_frequencies(spec.theta, spec.dim) / spec.params["factor"], 1.0


def _dynamic(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """NTK: increase the base if the served context is longer than the trained one."""
    trained, factor = spec.max_position_embeddings, spec.params["factor"]
    length = max(max_positions, trained)
    stretch = (factor * length / trained) - (factor - 1)
    theta = spec.theta * stretch ** (spec.dim / (spec.dim - 2))
    return _inverse_frequencies(theta, spec.dim), 1.0


def _llama3(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """Keep high frequencies, divide low ones by `factor`, and interpolate between them."""
    factor = spec.params["factor"]
    low, high = spec.params["low_freq_factor"], spec.params["high_freq_factor"]
    trained = spec.params["original_max_position_embeddings"]
    inverse = _inverse_frequencies(spec.theta, spec.dim)
    wavelength = 2 * math.pi / inverse
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > trained / low, inverse / factor, inverse)
    between = (wavelength <= trained / low) & (wavelength >= trained / high)
    return torch.where(between, blended, scaled), 1.0


def _yarn(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """YaRN: interpolate by wavelength, with a magnitude that preserves attention's entropy."""
    params, dim, theta = spec.params, spec.dim, spec.theta
    factor = params["factor"]
    trained = params.get("original_max_position_embeddings") or spec.max_position_embeddings
    fast, slow = params.get("beta_fast") or 32, params.get("beta_slow") or 1

    def turns_at(rotations: float) -> float:
        """Return the (real) dimension that makes this many rotations over the trained context."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(fast), turns_at(slow)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = _inverse_frequencies(theta, dim)
    mixed = inverse / factor * ramp + inverse * (1 - ramp)
    return mixed, _yarn_attention_factor(params, factor)


def _yarn_attention_factor(params: dict[str, Any], factor: float) -> float:
    """Return YaRN's factor of cos and sin."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def magnitude(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(factor, mscale) / magnitude(factor, mscale_all)
    return magnitude(factor)


def _longrope(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """LongRoPE: a factor for each frequency, in one list for short and one for long contexts."""
    params = spec.params
    trained = params.get("original_max_position_embeddings") or spec.max_position_embeddings
    factor = params.get("factor") or spec.max_position_embeddings / trained
    key = "long_factor" if max_positions > trained else "short_factor"
    factors = torch.tensor(params[key], dtype=torch.float32)
    if factors.shape != (spec.dim // 2,):
        raise ValueError(f"{key} must hold {spec.dim // 2} numbers")
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    inverse = 1.0 / (factors * spec.theta**exponent)
    magnitude = params.get("attention_factor", params.get(key.replace("factor", "mscale")))
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return inverse, float(magnitude)


_INVERSE_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
