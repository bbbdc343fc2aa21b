"""Triton's interpreter must be asked for before a kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
