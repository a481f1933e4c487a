"""Colour on a terminal, and none in a file or a pipe, or where NO_COLOR is set (no-color.org)."""

import os
from typing import Any

COLOURS = {"red": 31, "yellow": 33}


def in_colour(text: str, colour: str, stream: Any) -> str:
    """The text, coloured if the stream is a terminal."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[{COLOURS[colour]}m{text}\033[0m"
