"""The origin of a reference file, which its script writes under the key `made_by`.

tests/architecture/references.rs compares the versions with requirements.txt and the hashes with the
files, so that a reference fails when the model, the configuration or the pinned library changes.
"""

import hashlib
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PINNED = dict(line.split("==") for line in (HERE / "requirements.txt").read_text().split())


def made_by(*packages: str, files: list[Path] = ()) -> dict:
    """Versions of Python and the packages, and the SHA-256 of files of the repository, by path.

    Exits if the version of a package is not the one in requirements.txt.
    """
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            versions[name] = None
        if versions[name] != PINNED[name]:
            sys.exit(f"failed: {name} is {versions[name]}, requirements.txt pins {PINNED[name]}")
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted(files)}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    return {"packages": versions, "sha256": digests}


def model_files(folder: Path) -> list[Path]:
    """Weights, configuration and tokenizer of a model directory."""
    return [p for p in folder.iterdir() if p.name.startswith(("model", "config", "tokenizer"))]
