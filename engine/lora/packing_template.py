"""`PackingTemplates`: fast loading of adapters whose files have the same layout.

A trainer writes all adapters of a model with the same configuration and header. So their validation
and the destination of each value are determined once per layout. Loading another adapter means
reading its files once, hashing them, checking that values are finite, and copying these to where
kernels need them.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.contract.lora import (
    CONFIG_FILE,
    NEW_TOKENS_FILE,
    WEIGHTS_FILE,
    AdapterRef,
    FileFingerprints,
    digest_cache,
    file_fingerprints,
    tokenizer_files,
)
from engine.lora.adapter import LoRAAdapter
from engine.lora.layer_delta import AdaptableModel, LayerDeltaBuilder
from engine.lora.packing import LATENT_HEADS, AdapterPacker, has_only_matrices
from engine.lora.target_modules import TargetModules
from engine.models.decoder_spec import DecoderSpec
from engine.models.lora import AdapterWeights
from kernels.lora import LoraLayout, LoraSliceLayout, LoraTemplate, PackedLora

#: Maximum number of cached layouts, and maximum bytes of a header or configuration.
_MAX_LAYOUTS, _MAX_BYTES = 16, 1 << 22
#: Maximum file size for which a thread reuses its buffer: allocating new memory takes as long as
#: reading a file into it.
_MAX_SCRATCH_BYTES = 32 << 20
_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class _Template:
    """The common properties of adapters with the same layout.

    Attributes:
        rank: maximum rank of their modules.
        dtype: dtype of all values.
        sizes: bytes of their two files.
        slots: layer and slot of each item that `fill` packs.
    """

    rank: int
    dtype: torch.dtype
    sizes: tuple[int, int]
    slots: list[tuple[int, str]]
    fill: LoraTemplate


@dataclass(frozen=True, slots=True)
class _Files:
    """An adapter's two files, read once, and those of its tokenizer.

    Valid until the thread that read them reads other files.

    Attributes:
        start: offset of the weights' values.
        tokenizer: names and contents of its tokenizer's files, for the digest.
    """

    config: bytes
    weights: memoryview
    start: int
    tokenizer: list[tuple[str, bytes]]

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of each file."""
        return len(self.config), len(self.weights)

    @property
    def digest(self) -> str:
        """See `adapter_digest`."""
        digest = hashlib.sha256()
        files: list[tuple[str, bytes | memoryview]] = [
            (CONFIG_FILE, self.config),
            (WEIGHTS_FILE, self.weights),
        ]
        for name, content in files + self.tokenizer:
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    @property
    def layout(self) -> bytes:
        """Digest of everything except the values."""
        sizes = f"{len(self.config)} {len(self.weights)}\0".encode()
        return hashlib.sha256(sizes + self.config + self.weights[: self.start]).digest()

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return all values as a view."""
        return torch.frombuffer(self.weights, dtype=dtype, offset=self.start)


class PackingTemplates:
    """The layouts of one model's adapters. Thread-safe."""

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, _Template] = OrderedDict()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all layouts, since the model has changed."""
        with self._lock:
            self._templates.clear()

    def load(self, ref: AdapterRef, model: AdaptableModel) -> tuple[AdapterWeights, int] | None:
        """Load an adapter of a known layout; return it with its rank. None: it must be read
        completely, which also reports what is wrong with it.
        """
        with self._lock:
            sizes = {template.sizes for template in self._templates.values()}
        if not sizes:
            return None
        path = Path(ref.path)
        states = _states(path)
        files = _read(path, sizes)
        if files is None or states is None:
            return None
        layout = files.layout
        with self._lock:
            template = self._templates.get(layout)
            if template is None:
                return None
            self._templates.move_to_end(layout)
        if _digest_of(path, states, files) != ref.digest:
            return None
        packed = template.fill.fill(files.values(template.dtype))
        if packed is None:
            return None
        layers: list[dict[str, PackedLora]] = [{} for _ in range(model.spec.num_layers)]
        for (layer, slot), lora in zip(template.slots, packed, strict=True):
            layers[layer][slot] = lora
        weights = AdapterWeights(
            digest=ref.digest,
            layers=layers,
            table=model.lora_table(layers),
            num_bytes=sum(lora.nbytes for lora in packed),
        )
        return weights, template.rank

    def add_template(
        self,
        path: str,
        adapter: LoRAAdapter,
        model: AdaptableModel,
        weights_dtype: torch.dtype | None,
        modules: TargetModules,
    ) -> None:
        """Cache the layout of an adapter that was read from `path`, if other adapters may have it.

        `weights_dtype`: dtype in which weights are stored, None: that of the file.
        """
        is_unsupported = (
            model.lora_slots is not None
            or not isinstance(model.spec, DecoderSpec)
            or modules.vision is not None
        )
        if is_unsupported or not has_only_matrices(adapter):
            return
        dtypes, files = {tensor.dtype for tensor in adapter.tensors()}, _read(Path(path))
        if files is None or len(dtypes) != 1 or weights_dtype not in (None, *dtypes):
            return
        (dtype,) = dtypes
        packer = AdapterPacker(adapter, model, None, modules)
        slots, plans = [], []
        for layer in range(model.spec.num_layers):
            for slot, parts in packer.parts(layer):
                # Its matrices are transposed and packed by head.
                plan = None if slot == LATENT_HEADS else _plan_copy(parts, files)
                if plan is None:
                    return
                slots.append((layer, slot))
                plans.append(plan)
        fill = model.ops.lora_template(plans, dtype)
        if fill is None or files.digest != adapter.digest:
            return
        with self._lock:
            self._templates[files.layout] = _Template(adapter.rank, dtype, files.sizes, slots, fill)
            while len(self._templates) > _MAX_LAYOUTS:
                self._templates.popitem(last=False)


def _states(path: Path) -> FileFingerprints | None:
    """Return fingerprints of the files; None if they can't be accessed."""
    try:
        return file_fingerprints(path)
    except OSError:
        return None  # reading the adapter completely reports the error


def _digest_of(path: Path, states: FileFingerprints, files: _Files) -> str:
    """Return the digest of files that were read after `states` was taken.

    A digest that this process has computed is reused while the files are unchanged: hashing takes
    most of a load.
    """
    cached = digest_cache.get_cached(path, states)
    if cached is not None and _states(path) == states:
        return cached[0]
    digest = files.digest
    if not files.tokenizer:
        with suppress(OSError):
            digest_cache.store(path, states, digest, "")
    return digest


def _plan_copy(parts: LayerDeltaBuilder, files: _Files) -> LoraLayout | None:
    """Return where a layer's values are in the file; None if they aren't copied unchanged."""
    a = [_offset_in_file(matrix, files) for matrix in parts.a]
    b = [_offset_in_file(part[1], files) for part in parts.parts]
    if not parts.has_only_matrices or None in a or None in b:
        return None
    in_features, out_features = parts.sizes
    return LoraLayout(
        a=[(offset or 0, len(matrix)) for offset, matrix in zip(a, parts.a, strict=True)],
        parts=[
            LoraSliceLayout(offset or 0, first, tensor.shape[0], start, tensor.shape[1], scale)
            for offset, (first, tensor, start, scale) in zip(b, parts.parts, strict=True)
        ],
        in_features=in_features,
        out_features=out_features,
        round_inputs=parts.round_inputs,
    )


def _offset_in_file(tensor: Tensor, files: _Files) -> int | None:
    """Return the index in the file of the first value of a tensor that is a view of it, or None."""
    of_file = tensor.untyped_storage().nbytes() == len(files.weights)
    if not of_file or files.start % tensor.itemsize or not tensor.is_contiguous():
        return None
    return int(tensor.storage_offset()) - files.start // tensor.itemsize


def _scratch_bytes(count: int) -> memoryview:
    """Return a buffer of this size, which the thread reuses unless it is unusually large."""
    if count > _MAX_SCRATCH_BYTES:
        return memoryview(bytearray(count))
    buffer: bytearray | None = getattr(_scratch, "buffer", None)
    if buffer is None or len(buffer) < count:
        _scratch.buffer = buffer = bytearray(count)
    return memoryview(buffer)[:count]


def _read(folder: Path, sizes: Collection[tuple[int, int]] | None = None) -> _Files | None:
    """Read the files; None if they are missing or of another kind. Files of sizes that are not in
    `sizes` aren't read.
    """
    try:
        if (folder / NEW_TOKENS_FILE).exists():
            return None
        files = (folder / CONFIG_FILE, folder / WEIGHTS_FILE)
        config_size, weights_size = (file.stat().st_size for file in files)
        other = sizes is not None and (config_size, weights_size) not in sizes
        if other or config_size > _MAX_BYTES:
            return None
        config = (folder / CONFIG_FILE).read_bytes()
        weights = _scratch_bytes(weights_size)
        with (folder / WEIGHTS_FILE).open("rb", buffering=0) as file:
            if file.readinto(weights) != len(weights) or file.read(1):
                return None
        tokenizer = [(file.name, file.read_bytes()) for file in tokenizer_files(folder)]
    except OSError:
        return None  # reading the adapter completely reports the error
    start = 8 + int.from_bytes(weights[:8], "little")
    if not 8 < start <= min(_MAX_BYTES, len(weights) - 1):
        return None
    return _Files(config, weights, start, tokenizer)
