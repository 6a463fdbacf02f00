"""The names that users give models, and what they mean: a path, a repository on the Hugging Face hub, or a URL."""

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

from engine.errors import ModelFileError
from engine.system.invocation import call

HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
DEFAULT_REVISION = "main"

_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_ON_HUB = re.compile(rf"{_REPOSITORY}(?::(?P<quantization>[\w.-]+))?/?")
_FILE_ON_HUB = re.compile(
    rf"{_REPOSITORY}/(?:(?:resolve|blob)/(?P<revision>[^/.][^/]*)/)?(?P<file>[^:]+\.gguf)", re.I
)


@dataclass(frozen=True)
class HubModel:
    """A model in a repository on the hub: the one with this file, else the one with this quantization, else the first
    of `files.PREFERRED`."""

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
    """A model file at a URL outside the hub. As text it is its address without what may be secret."""

    url: str

    @property
    def file(self) -> str:
        """The file name to store it under: the last part of the URL, without characters that are unsafe in one."""
        name = re.sub(r"[^\w.+-]", "_", unquote(urlsplit(self.url).path).rstrip("/").rpartition("/")[2])
        return name.lstrip(".")[-100:] or "model.gguf"

    def __str__(self) -> str:
        return public_address(self.url)


def public_address(url: str) -> str:
    """`url` without a user's name and password, and without a query, which often holds a key."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


Source = Path | HubModel | WebFile


class KnownModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of models.toml. `draft`: what `parse` takes for a small one with the same tokens, "" if there is
    none. Unless it `chats`, it is for embeddings or ranks."""

    name: str
    repository: str
    quantization: str
    architecture: str
    draft: str = ""
    chats: bool = True

    @property
    def source(self) -> HubModel:
        return HubModel(self.repository, self.quantization)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """The models that have a short name, in the order of models.toml."""
    text = Path(__file__).with_name("models.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, tuple[KnownModel, ...]])["model"]


def parse(text: str, aliases: Mapping[str, str] = {}) -> Source:
    """The model that `text` names: an existing path, else `hf.co/user/repository[:quantization]` or a URL, else one of
    `aliases` (the user's names, for a path, a URL or a known name), else a known model, else a path that does not
    exist, if `text` looks like a path.

    Raises ModelFileError for an unknown name, with the most similar names. What separates the parts of a known name
    does not count: others write ministral-3:3b, or Qwen3 4B.
    """
    text = local_path(text.strip())
    path, exists = _path(text)
    if path is not None and exists:
        return _whole(path)
    if (source := _parse_url(text)) is not None:
        return source
    names = {name.lower(): name for name in aliases}
    if name := names.get(text.lower()):
        return parse(aliases[name])
    wanted = without_separators(text)
    if model := next((model for model in known_models() if without_separators(model.name) == wanted), None):
        return model.source
    if path is not None and (os.sep in text or text.lower().endswith(".gguf")):
        return _whole(path)
    known = [*aliases, *(model.name for model in known_models())]
    raise ModelFileError(f"There is no model called {text!r}.", _suggestion(text, known))


def local_path(text: str) -> str:
    """The path in a file:// address, as a desktop copies it; other text as it is."""
    path = text.removeprefix("file://").removeprefix("localhost")
    return unquote(path) if text.startswith("file://") and path.startswith("/") else text


def without_separators(name: str) -> str:
    """`name` in small letters, without what may stand between its parts: a space, a hyphen, an underscore, a colon."""
    return re.sub(r"[\s:_-]", "", name.lower())


def hub_hint(text: str) -> str:
    """A sentence with the address on the hub that is meant by `user/repository[:quantization]` or `hf:` before it; ""
    for other text."""
    found = _ON_HUB.fullmatch(re.sub(r"^(?:hf|huggingface):", "", text))
    is_meant = found and not text.lower().endswith(".gguf")
    return f"A model of the Hugging Face hub is hf.co/{found[0]}." if found and is_meant else ""


def short_name(source: Source, aliases: Mapping[str, str] = {}) -> str:
    """The shortest text that `parse` takes for `source`: an alias, a known name, or the path or URL."""
    for name, meaning in aliases.items():
        with contextlib.suppress(ModelFileError):
            if parse(meaning) == source:
                return name
    return next((model.name for model in known_models() if model.source == source), str(source))


def draft_for(text: str, aliases: Mapping[str, str] = {}) -> str:
    """The name of the draft model for the model that `text` names (`parse`); "" if none is known."""
    source = parse(text, aliases)
    return next((model.draft for model in known_models() if model.source == source), "")


def _path(text: str) -> tuple[Path | None, bool]:
    """`text` as a path, None if no file system can have it (empty, too long, a null byte); and whether a file exists
    there, or may exist in a folder that cannot be read."""
    try:
        path = Path(text).expanduser()
        return (path, path.exists()) if text else (None, False)
    except PermissionError:
        return path, True
    except (OSError, ValueError, RuntimeError):
        return None, False


def _whole(path: Path) -> Path:
    """From the root and without "..", so that one file has one name. Links stay: their names say more."""
    return path.parent.resolve() / path.name if ".." in path.parts else path.absolute()


def _parse_url(text: str) -> HubModel | WebFile | None:
    """The model at `hf.co/…` or a URL; None if `text` is neither. Raises ModelFileError if there can be no model."""
    try:
        url = urlsplit(text if "://" in text else f"https://{text}")
        scheme, host = url.scheme.lower(), (url.hostname or "").lower()
    except ValueError:  # brackets without an IPv6 address
        if text.lower().startswith(("http://", "https://")):
            raise ModelFileError(f"{text} is no web address.", "Check the part before the path.") from None
        return None
    mirror = ""
    with contextlib.suppress(ValueError):
        mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    path = unquote(url.path).strip("/")
    is_writable = text.isprintable() and path.isprintable()  # as the name of a file, and as an address
    if host in HUB_HOSTS or ("://" in text and url.netloc == mirror):
        if is_writable and (
            match := _FILE_ON_HUB.fullmatch(path) or _ON_HUB.fullmatch(path.removesuffix("/tree/main"))
        ):
            fields = {name: value for name, value in match.groupdict().items() if value}
            return HubModel(**{**fields, "quantization": fields.get("quantization", "").upper()})
        raise ModelFileError(
            f"{text} is not a model on the hub.", "Write hf.co/user/repository, and :Q4_K_M to choose a file."
        )
    if "://" not in text:
        return None
    if scheme in ("http", "https") and host and is_writable:
        return WebFile(text)
    raise ModelFileError(f"Models cannot be downloaded from {text}.", "Use a URL that begins with https://.")


def _suggestion(text: str, names: Iterable[str]) -> str:
    """A sentence with the names that the user may have meant by `text`."""
    wanted = text.lower()
    score = {name: difflib.SequenceMatcher(None, wanted, name.lower()).ratio() for name in names}
    family = [name for name in score if name.lower().split(":")[0] == wanted.split(":")[0]]
    similar = family or [name for name in sorted(score, key=lambda name: -score[name]) if score[name] >= 0.6]
    if re.fullmatch(_REPOSITORY, text):
        return f"For the repository of that name on the hub, write hf.co/{text}."
    if not similar:
        return f"{call('models')} lists the known names; hf.co/user/repository names any other model."
    return f"Similar names: {', '.join(similar[:3])}."
