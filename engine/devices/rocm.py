"""`RocmDevice`: an AMD GPU. torch's HIP answers under the name "cuda", so does Triton."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.devices.cuda import CudaDevice


class RocmDevice(CudaDevice):
    """The AMD GPU that torch sees first."""

    name: ClassVar[str] = "rocm"

    @classmethod
    def unavailable_reason(cls) -> str:
        """See `Device`."""
        if torch.version.hip is None:
            return "this torch was built without ROCm."
        return "" if torch.cuda.is_available() else "torch sees no AMD GPU."

    @property
    def arithmetic(self) -> tuple[str, str]:
        """See `Device`: the instruction set decides, which several products share."""
        architecture: str = torch.cuda.get_device_properties().gcnArchName
        return architecture, super().arithmetic[1]

    @classmethod
    def check_hardware(cls) -> None:
        """See `CudaDevice`: no AMD GPU is refused."""
