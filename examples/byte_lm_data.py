# SPDX-License-Identifier: Apache-2.0
"""Text for the byte model: the sources (and so the docstrings) of Python's standard library."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

# Third-party packages and caches are not part of Python; tests and tables are poor reading.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
VALIDATION_SHARE = 16  # one file in 16


@dataclass
class Corpus:
    """Files of one split, one after the other, and the windows that lie inside a file."""

    data: torch.Tensor  # [total bytes] uint8
    starts: torch.Tensor  # [number of windows of window_len bytes] start of each, int64
    window_len: int
    num_files: int

    def windows(self, starts: torch.Tensor) -> torch.Tensor:
        """Windows at the given starts, [len(starts), window_len] int64."""
        return self.data[starts.unsqueeze(1) + torch.arange(self.window_len)].long()

    def random_batch(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """Random windows, [batch_size, window_len]."""
        picks = torch.randint(len(self.starts), (batch_size,), generator=generator)
        return self.windows(self.starts[picks])

    def spread(self, count: int) -> torch.Tensor:
        """The same `count` windows every time, spread evenly over the text."""
        count = min(count, len(self.starts))
        picks = torch.arange(count) * len(self.starts) // count
        return self.windows(self.starts[picks])


def _source_files() -> list[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            files.append((name.as_posix(), path.read_bytes()))
    return files


def _corpus(texts: list[bytes], window_len: int) -> Corpus:
    starts, position = [], 0
    for text in texts:
        if len(text) >= window_len:
            starts.append(torch.arange(position, position + len(text) - window_len + 1))
        position += len(text)
    if not starts:
        raise SystemExit(f"no file of the standard library has {window_len} bytes")
    data = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    return Corpus(data, torch.cat(starts), window_len, len(texts))


def load_corpora(window_len: int) -> tuple[Corpus, Corpus]:
    """Training and validation text. A file belongs to one of them by the checksum of its name."""
    train, validation = [], []
    for name, text in _source_files():
        held_out = zlib.crc32(name.encode()) % VALIDATION_SHARE == 0
        (validation if held_out else train).append(text)
    return _corpus(train, window_len), _corpus(validation, window_len)
