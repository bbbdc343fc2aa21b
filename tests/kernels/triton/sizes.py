"""Sizes of models that the interpreter runs: each head of each token is a program of many steps."""

from __future__ import annotations

from typing import Any

#: Two that share their keys and values.
FEW_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
