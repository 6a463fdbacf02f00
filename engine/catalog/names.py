"""From what a user calls a model to where it is: a path, a repository of the hub, or an address."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from engine.errors import UsageError

HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
DEFAULT_REVISION = "main"

_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_ON_HUB = re.compile(rf"{_REPOSITORY}(?::(?P<quantization>[\w.-]+))?/?")
_FILE_ON_HUB = re.compile(
    rf"{_REPOSITORY}/(?:(?:resolve|blob)/(?P<revision>[^/]+)/)?(?P<file>[^:]+\.gguf)", re.I
)


@dataclass(frozen=True)
class HubModel:
    """A model in a repository of the hub: the file named, else the quantization, else the best there is."""

    repository: str
    quantization: str = ""
    file: str = ""
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        at = f"resolve/{self.revision}/" if self.file and self.revision != DEFAULT_REVISION else ""
        file = f"/{at}{self.file}" if self.file else ""
        return f"hf.co/{self.repository}{file}" + (f":{self.quantization}" if self.quantization else "")


@dataclass(frozen=True)
class WebFile:
    """A model file at an address that is not the hub's."""

    url: str

    @property
    def file(self) -> str:
        """The name it is kept under: the last part of the address, without what a folder cannot hold."""
        name = re.sub(r"[^\w.+-]", "_", unquote(urlsplit(self.url).path).rstrip("/").rpartition("/")[2])
        return name.lstrip(".")[-100:] or "model.gguf"

    def __str__(self) -> str:
        return self.url


Source = Path | HubModel | WebFile


class KnownModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of models.toml: one that the engine can run."""

    name: str
    repository: str
    quantization: str
    architecture: str

    @property
    def source(self) -> HubModel:
        return HubModel(self.repository, self.quantization)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """The models that have a short name, in the order of models.toml."""
    text = Path(__file__).with_name("models.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, tuple[KnownModel, ...]])["model"]


def parse(text: str, own: Mapping[str, str] = {}) -> Source:
    """What `text` names. A path that exists wins, then `hf.co/user/repository[:quantization]` and
    `https://…`, then the names in `own` (each stands for a path, an address or a known name), then the known
    ones. What looks like a path is one, though nothing is there.

    Raises UsageError, with the nearest names, for a name that nobody knows.
    """
    text = text.strip()
    if (path := _path(text)) is not None and _may_exist(path):
        return path.absolute()
    if (source := _explicit(text)) is not None:
        return source
    names = {name.lower(): name for name in own}
    if meant := names.get(text.lower()):
        return parse(own[meant])
    for model in known_models():
        if model.name == text.lower():
            return model.source
    if path is not None and (os.sep in text or text.lower().endswith(".gguf")):
        return path.absolute()
    raise UsageError(f"There is no model called {text!r}.", _nearest(text, [*own, *_known_names()]))


def short_name(source: Source, own: Mapping[str, str] = {}) -> str:
    """What a user would type for `source`: the shortest name that stands for it."""
    for name, meant in own.items():
        with contextlib.suppress(UsageError):
            if parse(meant) == source:
                return name
    return next((model.name for model in known_models() if model.source == source), str(source))


def _path(text: str) -> Path | None:
    """`text` as a path, None where it cannot be one."""
    try:
        path = Path(text).expanduser()
        _may_exist(path)  # too long, or a null byte: no file system has it
    except (OSError, ValueError, RuntimeError):
        return None
    return path if text else None


def _may_exist(path: Path) -> bool:
    """Whether there is such a file, or a folder that does not say so."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _explicit(text: str) -> HubModel | WebFile | None:
    """What `hf.co/…` or an address says; None where `text` is neither. Raises UsageError."""
    try:
        url = urlsplit(text if "://" in text else f"https://{text}")
        scheme, host = url.scheme.lower(), (url.hostname or "").lower()
    except ValueError:  # what is in brackets is no address
        return None
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", ""))
    if host in HUB_HOSTS or ("://" in text and url.netloc == endpoint.netloc):
        path = unquote(url.path).strip("/")
        if match := _FILE_ON_HUB.fullmatch(path) or _ON_HUB.fullmatch(path.removesuffix("/tree/main")):
            given = {name: value for name, value in match.groupdict().items() if value}
            return HubModel(**{**given, "quantization": given.get("quantization", "").upper()})
        raise UsageError(
            f"{text} names no model of the hub.", "Write hf.co/user/repository, and :Q4_K_M to choose a file."
        )
    if "://" not in text:
        return None
    if scheme in ("http", "https") and host:
        return WebFile(text)
    raise UsageError(f"{text} is no address that a model can be had from.", "It begins with https://.")


def _known_names() -> list[str]:
    return [model.name for model in known_models()]


def _nearest(text: str, names: Iterable[str]) -> str:
    """A sentence with the names that `text` may have meant."""
    wanted = text.lower()
    score = {name: difflib.SequenceMatcher(None, wanted, name.lower()).ratio() for name in names}
    family = [name for name in score if name.lower().split(":")[0] == wanted.split(":")[0]]
    near = family or [name for name in sorted(score, key=lambda name: -score[name]) if score[name] >= 0.6]
    if re.fullmatch(_REPOSITORY, text):
        return f"For the repository of that name on the hub, write hf.co/{text}."
    if not near:
        return "orin-chat models lists those with a name; hf.co/user/repository names any other."
    return f"Near it: {', '.join(near[:6])}."
