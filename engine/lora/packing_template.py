"""`PackingTemplates`: adapters whose files are laid out alike are packed alike.

A trainer writes all its adapters of a model with one configuration and one header: what is checked
of them, and where each number goes, is found out once. Of the next one the files are read once,
hashed and looked through for what is no number, and its numbers moved to where kernels want them.
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

#: Layouts that are remembered, and bytes of a header or configuration of one.
_MAX_LAYOUTS, _MAX_BYTES = 16, 1 << 22
#: The largest file that a thread keeps its memory for: the system takes as long to hand out fresh
#: memory as to read a file into it.
_MAX_SCRATCH_BYTES = 32 << 20
_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class _Template:
    """What adapters of one layout have in common.

    Attributes:
        rank: the largest of their modules.
        dtype: of all their numbers.
        sizes: bytes of their two files.
        slots: layer and slot of each thing that `fill` packs.
    """

    rank: int
    dtype: torch.dtype
    sizes: tuple[int, int]
    slots: list[tuple[int, str]]
    fill: LoraTemplate


@dataclass(frozen=True, slots=True)
class _Files:
    """An adapter's two files as they were read, once, and those of its tokenizer.

    Good until the thread that read them reads others.

    Attributes:
        start: where the weights' numbers begin.
        tokenizer: names and contents of what it brings of one, for the digest.
    """

    config: bytes
    weights: memoryview
    start: int
    tokenizer: list[tuple[str, bytes]]

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of each."""
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
        """All but the numbers, as a digest."""
        sizes = f"{len(self.config)} {len(self.weights)}\0".encode()
        return hashlib.sha256(sizes + self.config + self.weights[: self.start]).digest()

    def values(self, dtype: torch.dtype) -> Tensor:
        """All numbers, a view."""
        return torch.frombuffer(self.weights, dtype=dtype, offset=self.start)


class PackingTemplates:
    """The layouts of adapters of one model. Any thread may call it."""

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, _Template] = OrderedDict()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all: there is another model."""
        with self._lock:
            self._templates.clear()

    def load(self, ref: AdapterRef, model: AdaptableModel) -> tuple[AdapterWeights, int] | None:
        """An adapter of a known layout, and its rank; None: it must be read as a whole, by which
        what is wrong with it is found too.
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
        """Remember the layout of an adapter that was read from `path`, where others may have it.

        `weights_dtype`: what weights are kept in, None: as they are.
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
                # Its matrices are turned around and packed by head.
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
    """None where the files can't be looked at."""
    try:
        return file_fingerprints(path)
    except OSError:
        return None  # what is wrong is told by who reads it as a whole


def _digest_of(path: Path, states: FileFingerprints, files: _Files) -> str:
    """Of files that were read behind `states`.

    What this process has hashed isn't hashed again while nothing was written: that takes most of a
    load.
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
    """Where a layer's numbers are in the file; None where they aren't taken as they are there."""
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
    """Which number of the file a tensor begins with, that is a view of its bytes."""
    of_file = tensor.untyped_storage().nbytes() == len(files.weights)
    if not of_file or files.start % tensor.itemsize or not tensor.is_contiguous():
        return None
    return int(tensor.storage_offset()) - files.start // tensor.itemsize


def _scratch_bytes(count: int) -> memoryview:
    """Memory of so many bytes, the calling thread's own where it's of a usual size."""
    if count > _MAX_SCRATCH_BYTES:
        return memoryview(bytearray(count))
    buffer: bytearray | None = getattr(_scratch, "buffer", None)
    if buffer is None or len(buffer) < count:
        _scratch.buffer = buffer = bytearray(count)
    return memoryview(buffer)[:count]


def _read(folder: Path, sizes: Collection[tuple[int, int]] | None = None) -> _Files | None:
    """The files; None where they are of another kind, or none. Files of other sizes than
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
        return None  # what is wrong is told by who reads it as a whole
    start = 8 + int.from_bytes(weights[:8], "little")
    if not 8 < start <= min(_MAX_BYTES, len(weights) - 1):
        return None
    return _Files(config, weights, start, tokenizer)
