"""A picture that the demo model that sees describes."""

from __future__ import annotations

from PIL import Image, ImageDraw

from demo.vision.pictures import COLORS


def red_circle() -> Image.Image:
    """On white."""
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((16, 16, 80, 80), fill=COLORS["red"])
    return image
