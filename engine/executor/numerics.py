"""What determines the bits of a replica's tokens, by which a stream's next replica is chosen."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch

from engine.checkpoints.ctranslate2 import MODEL_FILE, is_ctranslate2
from engine.checkpoints.gguf.folder import find_gguf
from engine.checkpoints.model_files import model_digest
from engine.contract.checkpoint_options import ONLINE_METHODS
from engine.contract.engine_config import EngineConfig
from engine.contract.replica_state import Numerics
from engine.model_loader.loader import resolve_folder

log = logging.getLogger(__name__)

#: Settings that change numerical results and have no field of their own in `Numerics`.
_SETTINGS = (
    "attention_backend",
    "batch_invariant",
    "block_size",
    "calculate_kv_scales",
    "cpu_kernels",
    "hf_overrides",
    "load_format",
    "lora_dtype",
    "mamba_ssm_cache_dtype",
    "model_impl",
    "rope_scaling",
    "rope_theta",
    "round_activations",
)


def read_numerics(
    config: EngineConfig, arithmetic: tuple[str, str], dtype: torch.dtype
) -> Numerics | None:
    """The numerics of a loaded model; None, with a logged warning, if its files can't be read any
    more.

    `arithmetic`: instruction set or GPU, and the kernels' build. `dtype`: of the linear weights.
    """
    try:
        path = Path(config.model).expanduser()
        file = path / MODEL_FILE if is_ctranslate2(path) else find_gguf(path)
        weights = model_digest(file or resolve_folder(config))
        settings = {name: str(getattr(config, name)) for name in _SETTINGS}
        if config.quantization_param_path:
            scales = Path(config.quantization_param_path).expanduser().read_bytes()
            settings["kv_scales"] = hashlib.sha256(scales).hexdigest()
    except OSError as error:
        log.warning("The weights can't be read for their digest: %s", error)
        return None
    isa, kernels = arithmetic
    return Numerics(
        weights=weights,
        isa=isa,
        kernels=kernels,
        dtype=str(dtype).removeprefix("torch."),
        # The checkpoint's format is that of the weights, named or not; bitsandbytes rounds others.
        quantization=config.quantization
        if config.quantization in (*ONLINE_METHODS, "bitsandbytes")
        else "",
        kv_cache_dtype=config.kv_cache_dtype,
        settings=settings,
    )
