"""Which file of a repository is meant: names of GGUF files, their quantizations, their parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from engine.catalog.names import HubModel
from engine.errors import ModelFileError

# What is taken where nothing is asked for: the first of these that a repository has. By how well they do for
# their size, as llama.cpp's and Ollama's defaults have it; all are types of engine/formats/quantization.py.
PREFERRED = (
    "Q4_K_M", "Q5_K_M", "Q4_K_S", "Q5_K_S", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K",
    "Q4_K_L", "Q5_K_L", "Q6_K_L", "BF16", "F16", "F32",
)  # fmt: skip
_CANNOT_RUN = re.compile(r"(UD-)?(IQ|TQ|Q[123]_|MXFP|NVFP|Q4_0_\d)")
_LABEL = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F[P]?16|F[P]?32)[A-Z0-9_]*)$", re.I)
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})(?=\.gguf$)", re.I)
_NO_MODEL = re.compile(r"mmproj|imatrix|\blora\b", re.I)  # projectors, statistics, adapters


@dataclass(frozen=True)
class Choice:
    """One model of a repository: its files in order (several where it is split)."""

    files: tuple[str, ...]
    quantization: str  # by the file's name; "" where that does not tell

    @property
    def file(self) -> str:
        """The file that opens it."""
        return self.files[0]

    @property
    def may_run(self) -> bool:
        """Whether the name speaks against it. The file has the last word."""
        return not _CANNOT_RUN.match(self.quantization)


def quantization_of(file: str) -> str:
    """The quantization that the name of a file or of its folder tells: Q4_K_M; "" where it tells none."""
    folder, _, name = _PART.sub("", file).rpartition("/")
    for text in (re.sub(r"\.gguf$", "", name, flags=re.I), folder.rpartition("/")[2]):
        if match := _LABEL.search(text):
            return match[1].upper().replace("FP", "F") if "MXFP" not in match[1].upper() else match[1].upper()
    return ""


def choices(files: Iterable[str]) -> list[Choice]:
    """The models among the files of a repository, those of which a part is missing left out."""
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for file in files:
        if not file.lower().endswith(".gguf") or _NO_MODEL.search(file) or not is_safe(file):
            continue
        part = _PART.search(file)
        whole = _PART.sub("", file)
        found.setdefault(whole, {})[int(part["number"]) if part else 1] = file
        counts[whole] = int(part["count"]) if part else 1
    return [
        Choice(tuple(parts[number] for number in sorted(parts)), quantization_of(whole))
        for whole, parts in sorted(found.items())
        if sorted(parts) == list(range(1, counts[whole] + 1))
    ]


def is_safe(file: str) -> bool:
    """Whether a name that a server gave stays within the folder it is stored in."""
    return (
        "\\" not in file and "\0" not in file and all(part not in ("", ".", "..") for part in file.split("/"))
    )


def pick(model: HubModel, offered: list[Choice]) -> Choice | None:
    """The one that `model` asks for, or None. Of several of a quantization the one with the shortest name."""
    if model.file:
        return next((choice for choice in offered if model.file in choice.files), None)
    wanted = [model.quantization.upper()] if model.quantization else [*PREFERRED, ""]
    for quantization in wanted:
        fitting = [choice for choice in offered if choice.quantization == quantization]
        if fitting:
            return min(fitting, key=lambda choice: (len(choice.file), choice.file))
    return None


def must_pick(model: HubModel, offered: list[Choice]) -> Choice:
    """As `pick`. Raises ModelFileError, with what there is, for a model that is not there or cannot run."""
    choice = pick(model, offered)
    if choice is not None and choice.may_run:
        return choice
    repository = f"hf.co/{model.repository}"
    if not offered:
        raise ModelFileError(
            f"{repository} holds no GGUF model.", "Look for a repository whose name ends in -GGUF."
        )
    runnable = sorted({choice.quantization for choice in offered if choice.may_run and choice.quantization})
    if not runnable:
        kinds = ", ".join(sorted({choice.quantization for choice in offered}))
        raise ModelFileError(
            f"{repository} holds no file of a type that orin-chat runs (there are {kinds}).",
            "Look for another repository of this model, with Q4_K_M or Q8_0.",
        )
    what = model.file or model.quantization
    problem = f"{what} is of a type that orin-chat does not run" if choice else f"{repository} has no {what}"
    raise ModelFileError(
        f"{problem or repository}.", f"It has {', '.join(runnable)}: {repository}:{runnable[0]}."
    )
