"""Fetches the libraries of the chat page from the npm registry: `python tests/web/bundle.py`.

Each package's archive is compared with the integrity that libraries.json names, and each file's sha256 is written
there. It runs only when a version in that list is changed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import lzma
import tarfile
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "qwen_onnx" / "web" / "libraries"
LIST = FOLDER / "libraries.json"
XZ = ".xz"


def main() -> None:
    """Write every file, and the list with their hashes."""
    packages = json.loads(LIST.read_text(encoding="utf-8"))
    for name, package in packages.items():
        archive = _fetched(name, package["version"], package["integrity"])
        with tarfile.open(fileobj=io.BytesIO(archive)) as held:
            for target, spec in package["files"].items():
                member = held.extractfile(f"package/{spec['from']}")
                if member is None:
                    raise SystemExit(f"{name}: has no {spec['from']}")
                content = member.read()
                if target.endswith(XZ):
                    content = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
                else:  # no map is served
                    content = b"".join(
                        line for line in content.splitlines(True) if not line.startswith(b"//# sourceMapping")
                    )
                path = FOLDER / target
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
                spec["sha256"] = hashlib.sha256(content).hexdigest()
    LIST.write_text(json.dumps(packages, indent=1) + "\n", encoding="utf-8")


def _fetched(name: str, version: str, integrity: str) -> bytes:
    url = f"https://registry.npmjs.org/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    with urllib.request.urlopen(url) as answer:
        archive: bytes = answer.read()
    found = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if integrity != f"sha512-{found}":
        raise SystemExit(f"{url}: sha512-{found} found, {integrity} wanted")
    return archive


if __name__ == "__main__":
    main()
