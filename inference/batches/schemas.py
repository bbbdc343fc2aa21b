"""The body of `POST /v1/batches`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

MAX_METADATA = 16
_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 14 * 86_400

BatchMetadata = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=MAX_METADATA),
]


def _seconds(window: str) -> int:
    """0 for what can't be read."""
    match = _WINDOW.fullmatch(window)
    return int(match[1]) * _UNIT_S[match[2]] if match else 0


class OutputExpiresAfter(BaseModel):
    """When output and error file are removed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchRequest(BaseModel):
    """A batch to run. `completion_window`: minutes, hours or days, such as "24h"; 14 d at most."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: str
    metadata: BatchMetadata | None = None
    output_expires_after: OutputExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def _window(cls, window: str) -> str:
        if not 0 < _seconds(window) <= MAX_WINDOW_S:
            raise ValueError("must be a duration such as '24h' (units m, h, d; at most '14d').")
        return window

    @property
    def window_s(self) -> int:
        """The completion window in seconds."""
        return _seconds(self.completion_window)
