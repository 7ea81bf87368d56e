# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Cuts a large file into parts and joins them again, for a machine that takes only small files.

python benchmarks/gguf_parts.py split model.gguf parts/
python benchmarks/gguf_parts.py join parts/ model.gguf
"""

import hashlib
import sys
from pathlib import Path


PART_BYTES = 48 * 10**6


def split(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(file, "rb") as source:
        for number, content in enumerate(iter(lambda: source.read(PART_BYTES), b"")):
            (folder / f"{file.name}.{number:03d}").write_bytes(content)
    (folder / "sha256").write_text(hashlib.sha256(file.read_bytes()).hexdigest())


def join(folder: Path, file: Path) -> None:
    """Refuses parts that are not all there."""
    content = b"".join(part.read_bytes() for part in sorted(folder.glob("*.[0-9][0-9][0-9]")))
    if hashlib.sha256(content).hexdigest() != (folder / "sha256").read_text():
        sys.exit(f"The parts in {folder} are not the whole file: {len(content)} bytes.")
    file.write_bytes(content)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("split", "join"):
        sys.exit(__doc__)
    {"split": split, "join": join}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
