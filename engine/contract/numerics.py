"""`Numerics`: what decides the bits of a replica's tokens. Torch-free."""

from __future__ import annotations

import hashlib

import msgspec


class Numerics(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Two replicas with equal ones make the same tokens of the same request.

    Attributes:
        weights: sha256 over the model's configuration and weights, 64 hex digits.
        isa: the instruction set in use, or the GPU's name.
        kernels: build of the kernels, with the library that runs what they don't.
        dtype, quantization, kv_cache_dtype: of activations and plain weights; of weights that are
            rounded; of keys and values.
        settings: other settings that change numbers, by name.
    """

    weights: str
    isa: str = ""
    kernels: str = ""
    dtype: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    settings: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Sha256 of all of it, 64 hex digits."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="sorted")).hexdigest()
