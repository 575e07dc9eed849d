# SPDX-License-Identifier: Apache-2.0
"""Reads from a built library what it needs and which cards it has code for."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

# What may stand in the library's list of needed ones: torch, what torch itself depends on, and the
# C and C++ runtime.
ALLOWED_LIBRARIES = re.compile(
    r"(libtorch(_cpu)?|libc10|libcudart)\.so(\.\d+)?"
    r"|lib(c|m|dl|pthread|rt|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
)

_FATBIN = struct.pack("<IH", 0xBA55ED50, 1)
_PTX, _CUBIN = 1, 2


def needed(library: Path) -> list[str]:
    """The names of the shared libraries that the dynamic loader looks for."""
    done = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    )
    return re.findall(r"\(NEEDED\).*\[(.*?)\]", done.stdout)


def cards(library: Path) -> set[frozenset[str]]:
    """The cards of each fat binary, "80" for machine code and "80+PTX" for PTX, each set once.

    There is a fat binary for each compiled file; the files of one section have the same cards.
    """
    data = library.read_bytes()
    found = set()
    at = data.find(_FATBIN)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        inside = set()
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (number,) = struct.unpack_from("<I", data, entry + 28)
            if kind in (_PTX, _CUBIN):
                inside.add(f"{number}+PTX" if kind == _PTX else f"{number}")
            entry += entry_header + entry_size
        found.add(frozenset(inside))
        at = data.find(_FATBIN, end)
    return found
