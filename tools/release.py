"""A wheel of the last commit, looked through, and the list of what is installed beside it.

    python -m tools.release [FOLDER]     FOLDER: dist unless given

Builds the wheel from the files of the last commit alone, holds its contents against these, and writes a software bill
of materials from `requirements.lock`, in CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json/).
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("app", "engine", "presets", "widgets")
_LOCKED = re.compile(
    r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\\n]+?))? \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    re.MULTILINE,
)


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    if differences := wrong_contents(wheel, committed()):
        print(*differences, sep="\n")
        return 1
    bill = wheel.with_suffix(".cdx.json")
    bill.write_text(json.dumps(bill_of_materials((ROOT / "requirements.lock").read_text("utf-8")), indent=2))
    print(wheel, bill, sep="\n")
    return 0


def committed() -> list[str]:
    """The files of the last commit."""
    return _git("ls-tree", "-r", "--name-only", "-z", "HEAD").decode().split("\0")[:-1]


def build(folder: Path) -> Path:
    """Builds the wheel of the last commit into a folder."""
    with tempfile.TemporaryDirectory() as source:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as files:
            if hasattr(tarfile, "data_filter"):  # Python 3.11.4
                files.extraction_filter = staticmethod(tarfile.data_filter)
            files.extractall(source)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            source,
            source,
        ]
        subprocess.run(command, check=True)
        [built] = Path(source).glob("*.whl")
        return built.replace(folder / built.name)


def wrong_contents(wheel: Path, files: Iterable[str]) -> list[str]:
    """Sentences about files that a wheel lacks, and about those that it should not have. `files`: the commit's."""
    wanted = {file for file in files if file.split("/")[0] in PACKAGES}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    lacks = [f"{wheel.name} lacks {file}" for file in sorted(wanted - held)]
    return lacks + [f"{wheel.name} holds {file}, which is in no commit" for file in sorted(held - wanted)]


def bill_of_materials(lock: str) -> dict[str, Any]:
    """What `requirements.lock` installs: names, versions, and the hashes of the files that may be taken."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own = {"type": "application", "name": project["name"], "version": project["version"]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own | {"licenses": [{"license": {"id": project["license"]}}]}},
        "components": [_component(*found) for found in _LOCKED.findall(lock)],
    }


def _component(name: str, version: str, marker: str, hashes: str) -> dict[str, Any]:
    component = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "bom-ref": f"{name}@{version}",
        "hashes": [{"alg": "SHA-256", "content": each} for each in re.findall(r"\w{64}", hashes)],
    }
    return component | ({"properties": [{"name": "marker", "value": marker}]} if marker else {})


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
