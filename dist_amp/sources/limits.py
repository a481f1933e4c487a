"""What a file may hold: forged ones crash the libraries that read it, or fill the memory."""

from contextlib import closing
from typing import BinaryIO

import numpy as np
from fsspec.compression import compr

from dist_amp.config.memory import host_memory, size_text
from dist_amp.errors import DataError

# Arrow's JSON reader needs some 1 KiB of stack per level: it crashed at 20,000, not at 5,000
# (pyarrow 26, 8 MiB of stack; threads have less).
MOST_NESTED = 1000
# Text shrinks to a third to a tenth, logs of few different lines to a hundredth.
MOST_EXPANDED = 100
BLOCK = 2**20
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_file(
    name: str, file: BinaryIO, size: int, compression: str | None, is_json: bool
) -> None:
    """Read a file in blocks. compression: fsspec's name. Errors: DataError for a forged one."""
    if compression is None and not is_json:
        return
    nesting = Nesting()
    expanded = 0
    with closing(compr[compression](file, mode="rb")) as content:
        while block := content.read(BLOCK):
            expanded += len(block)
            if expanded > max(MOST_EXPANDED * size, host_memory() // 4):
                raise DataError(
                    f"{name} has {size_text(size)} and expands to more than {size_text(expanded)}, "
                    f"{MOST_EXPANDED} times as much and a quarter of the memory; if that is right, "
                    "give it decompressed"
                )
            if is_json and nesting.add(block) > MOST_NESTED:
                raise DataError(
                    f"{name} has JSON that is nested more than {MOST_NESTED} levels deep, in its "
                    f"first {size_text(expanded)}; remove that row"
                )


class Nesting:
    """How deeply JSON is nested, block by block; strings don't count, wherever a block ends."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_in_string = False
        self.rest = b""  # a backslash at a block's end

    def add(self, block: bytes) -> int:
        # Without escapes, each quote begins a string or ends one.
        plain = (self.rest + block).replace(b"\\\\", b"").replace(b'\\"', b"")
        self.rest = b"\\" if plain.endswith(b"\\") else b""
        pieces = plain.split(b'"')
        outside = b"".join(pieces[self.is_in_string :: 2])
        self.is_in_string ^= len(pieces) % 2 == 0
        brackets = np.frombuffer(outside.translate(None, NOT_BRACKETS), np.uint8)
        # [ is 91 and ] 93, { is 123 and } 125.
        depths = self.depth + np.where((brackets & 2) != 0, 1, -1).cumsum()
        if not len(depths):
            return self.depth
        self.depth = max(0, int(depths[-1]))
        return int(depths.max())
