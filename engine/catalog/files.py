"""The models in a repository, by the names of its GGUF files: their quantizations, their parts, the one to take."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from engine.catalog.names import HubModel
from engine.errors import ModelFileError
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import READ_TYPES

# The quantization to take if none is asked for: the first of these that a repository has. They are ordered by quality
# for their size, as the defaults of llama.cpp and Ollama are. All types of them are in engine/formats/quantization.py.
PREFERRED = (
    "Q4_K_M", "Q5_K_M", "Q4_K_S", "Q5_K_S", "Q4_K_XL", "Q5_K_XL", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q4_K", "Q5_K", "Q4_K_L", "Q5_K_L", "Q6_K_L", "Q6_K_XL", "Q8_K_XL", "MXFP4", "MXFP4_MOE", "NVFP4", "IQ4_XS",
    "IQ4_NL", "BF16", "F16", "F32", "Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q3_K", "IQ3_M", "IQ3_S", "IQ3_XS",
    "IQ3_XXS", "Q2_K_XL", "Q2_K_L", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "I2_S", "TQ1_0",
    "IQ1_M", "IQ1_S",
)  # fmt: skip
_RUN = {GGML_TYPES[kind].name for kind in READ_TYPES}
_NOT_RUN = {type.name for type in GGML_TYPES.values()} - _RUN
_FAMILIES_NOT_RUN = {name.partition("_")[0] for name in _NOT_RUN} - {name.partition("_")[0] for name in _RUN}
_FORK = re.compile(r"IQ\d_K[STL]*|\w*_R\d")
"""Types of ik_llama.cpp alone."""
_LABEL = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|I2_S|MXFP4|NVFP4|BF16|FP?16|FP?32)[A-Z0-9_]*)$", re.I)
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})(?=\.gguf$)", re.I)
_DRAFTER = re.compile(
    r"(?:^|/)(?:mtp|dflash|eagle\d?)[-_][^/]*$|(?:^|/)mtp/|[-._](?:I?Q\d\w*|BF16|F16|F32)-mtp\.gguf$", re.I
)
"""Drafters beside the models that they were made for; draft heads that a model's own file holds are named otherwise."""
_NOT_A_MODEL = re.compile(r"mmproj|imatrix|\blora\b", re.I)  # image projectors, statistics, adapters


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model, in order: several if it is split. `quantization` is taken from the file name; "" if
    the name has none."""

    files: tuple[str, ...]
    quantization: str

    @property
    def file(self) -> str:
        """The file to open."""
        return self.files[0]

    @property
    def may_run(self) -> bool:
        """False if the name tells that the engine cannot run the model. True is a guess: only the file's contents
        tell for sure."""
        name = self.quantization.removeprefix("UD-")
        if _FORK.fullmatch(name):
            return False
        return name not in _NOT_RUN and name.partition("_")[0] not in _FAMILIES_NOT_RUN


def quantization_of(file: str) -> str:
    """The quantization in the name of a file or of its folder, in capitals (Q4_K_M); "" if there is none."""
    folder, _, name = _PART.sub("", file).rpartition("/")
    for text in (re.sub(r"\.gguf$", "", name, flags=re.I), folder.rpartition("/")[2]):
        if match := _LABEL.search(text):
            return re.sub(r"^FP(?=16|32)", "F", match[1].upper())
    return ""


def models_among(files: Iterable[str]) -> list[ModelFiles]:
    """The models among the file names of a repository, without those that lack a part."""
    parts: dict[str, dict[int, str]] = {}  # the name without the part's number -> number of the part -> file
    counts: dict[str, int] = {}
    for file in files:
        if not file.lower().endswith(".gguf") or _NOT_A_MODEL.search(file) or not is_safe(file):
            continue
        part = _PART.search(file)
        base_name = _PART.sub("", file)
        parts.setdefault(base_name, {})[int(part["number"]) if part else 1] = file
        counts[base_name] = int(part["count"]) if part else 1
    return [
        ModelFiles(tuple(numbered[number] for number in sorted(numbered)), quantization_of(base_name))
        for base_name, numbered in sorted(parts.items())
        if sorted(numbered) == list(range(1, counts[base_name] + 1))
    ]


def is_safe(file: str) -> bool:
    """Whether a relative path from a server stays within the folder that it is joined to, and is text that no terminal
    obeys."""
    return (
        file.isprintable()
        and "\\" not in file
        and all(part not in ("", ".", "..") for part in file.split("/"))
    )


def pick(model: HubModel, models: list[ModelFiles]) -> ModelFiles | None:
    """The one of `models` that `model` asks for, or None. If several have the quantization, the one with the shortest
    name; if none has, Unsloth's mix of that name, as UD-Q4_K_XL for Q4_K_XL. A drafter has to be named by its file,
    unless there are no others."""
    if model.file:
        return next((files for files in models if model.file in files.files), None)
    models = [files for files in models if not _DRAFTER.search(files.file)] or models
    wanted = [model.quantization.upper()] if model.quantization else [*PREFERRED, ""]
    for quantization in wanted:
        for name in quantization, f"UD-{quantization}":
            if same := [files for files in models if files.quantization == name]:
                return min(same, key=lambda files: (len(files.file), files.file))
    return None


def must_pick(model: HubModel, models: list[ModelFiles]) -> ModelFiles:
    """As `pick`, but raises ModelFileError if the model does not exist or cannot run; the hint lists the others."""
    picked = pick(model, models)
    if picked is not None and picked.may_run:
        return picked
    repository = f"hf.co/{model.repository}"
    if not models:
        raise ModelFileError(
            f"{repository} holds no GGUF model, or none with all of its parts.",
            "Look for a repository whose name ends in -GGUF.",
        )
    runnable = [files for files in models if files.may_run]
    if not runnable:
        types = ", ".join(sorted({files.quantization for files in models}))
        raise ModelFileError(
            f"{repository} has no file of a type that orin-chat runs (it has {types}).",
            "Look for another repository of this model, with Q4_K_M or Q8_0.",
        )
    wanted = model.file or model.quantization
    if picked:
        problem = f"{wanted} is of a type that orin-chat does not run"
    else:
        problem = f"{repository} has no {wanted or 'file of a usual type'}"
    ways = [f":{name}" for name in sorted({files.quantization for files in runnable} - {""})]
    ways += [f"/{files.file}" for files in runnable if not files.quantization]
    raise ModelFileError(
        f"{problem}.", f"It has {', '.join(way[1:] for way in ways)}: {repository}{ways[0]}."
    )
