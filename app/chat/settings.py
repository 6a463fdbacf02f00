"""The user's settings (settings.toml, which is only read), and what one run stores for the next (last model, theme)."""

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import platformdirs
from msgspec import Meta

from app.chat.idle_tuner import WhenIdle
from app.chat.setting_flaws import flaw
from app.tools.messages import SERVER_NAME, Server
from engine.errors import UsageError
from engine.formats.kv_format import KVFormat
from engine.protocol.events import ContextLength, Sampling, Speculate
from engine.system.whole_file import read_file, read_text, write_whole
from presets import GUIDE, guide_path
from presets.sampling import PresetSampling, out_of_range

MOST_FLAWS = 20
"""Sentences about one file. What is behind them is not looked at: each key takes time."""


class SamplingSettings(PresetSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [sampling]: the fields of `Sampling`; None leaves an option to the model's file."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of settings.toml and their defaults; [sampling], [models] and [mcp.NAME] are tables."""

    model: str = ""
    preset: str = ""
    backend: str = "auto"
    context: ContextLength = None
    kv: KVFormat | None = None
    speculate: Speculate | None = None
    system: str = ""
    keys: Literal["plain", "vi"] = "plain"  # in the prompt
    thumbnails: Literal["auto", "blocks", "off"] = "auto"  # auto: drawn by a terminal that says it can
    search_when_idle: WhenIdle = "mains"  # for faster kernels, on a GPU: mains, always, never
    llama_server: str = ""  # the program, or the address of a server, for comparisons
    keep_packed: bool = False  # stores a CPU's packed weights on disk for the next start
    keep_warm: str = ""  # for how long the engine lives on for the next run: 10m
    limits: str = ""  # what each key may ask of `serve`: requests=60,tokens=100000,open=4
    # Of long chats on disk; None: what the disk has room for.
    prefix_cache_gb: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    mcp: dict[str, Server] = {}  # servers of tools, by name
    models: dict[str, str] = {}  # the user's own names of files and addresses
    sampling: SamplingSettings = SamplingSettings()

    @property
    def names(self) -> dict[str, str]:
        """Names of models and what they stand for: the built-in model, and the user's own names."""
        return {GUIDE: str(guide_path()), **self.models}


def settings_path() -> Path:
    return platformdirs.user_config_path("orin-chat", appauthor=False) / "settings.toml"


def load_settings(path: Path | None = None) -> Settings:
    """The settings in `path` (None: `settings_path()`), or the defaults if there is no such file.

    Raises UsageError, which names the file and the key, if the file cannot be read or is not valid.
    """
    path = path or settings_path()
    try:
        settings = msgspec.toml.decode(read_text(path), type=Settings)
        _check(settings)
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except RecursionError as error:
        raise UsageError(f"The settings in {path} cannot be used: lists within lists.") from error
    except (OSError, ValueError, UsageError) as error:  # msgspec's errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UsageError(f"The settings in {path} cannot be used: {reason}.") from error
    return settings


def usable_settings(path: Path | None = None) -> tuple[Settings, tuple[str, ...]]:
    """The settings in `path` (None: `settings_path()`) without the keys that cannot be used, and a sentence on each of
    these."""
    path = path or settings_path()
    try:
        return load_settings(path), ()
    except UsageError as error:
        whole = str(error)
    try:
        tables = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError):  # no part of the file can be read
        return Settings(), (f"{whole} The defaults are used instead.",)
    usable: dict[str, Any] = {}
    flaws = list[str]()
    for names, value in _leaves(tables):
        if len(flaws) == MOST_FLAWS:
            flaws.append(f"{path.name}: what follows is left out, too.")
            break
        tried = _with(usable, names, value)
        try:
            _check(msgspec.convert(tried, Settings))
            usable = tried
        except (ValueError, UsageError) as error:
            reason = flaw(str(error).rstrip("."), names, Settings)
            flaws.append(
                f"{path.name}: {'.'.join(names)} is left out: {reason}{'' if reason[-1] == '?' else '.'}"
            )
    return msgspec.convert(usable, Settings), tuple(flaws)


def _leaves(tables: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each key with its value; those of tables by the names of both."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from (((name, key), inner) for key, inner in value.items())
        else:
            yield (name,), value


def _with(tables: dict[str, Any], names: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = names
    return {**tables, name: {**tables.get(name, {}), rest[0]: value} if rest else value}


def _check(settings: Settings) -> None:
    """Raises UsageError."""
    check_sampling(settings.sampling)
    for name in settings.mcp:
        if not SERVER_NAME.fullmatch(name):
            raise UsageError(f"The name of a server has small letters, digits, _ and -, not {name!r}.")


def check_sampling(sampling: Sampling | PresetSampling) -> None:
    """Raises UsageError, which names the option and its range, for a value out of its range."""
    if flaw := out_of_range(sampling):
        raise UsageError(f"{flaw}.")


# --- from one run to the next -----------------------------------------------------------------------------


def remembered(key: str) -> str:
    """The value that `remember` stored last; "" if there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return read_file(_remembered_path(key)).decode().strip()
    return ""


def remember(key: str, value: str) -> None:
    """Stores one line. A state folder that cannot be written is ignored."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        write_whole(_remembered_path(key), f"{value}\n".encode())


def _remembered_path(key: str) -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / f"last-{key}"


def last_model() -> str:
    """The path or the name of the model used last; "" if there is none."""
    return remembered("model")


def remember_model(name: str) -> None:
    """Stores the path or the name of the model used last. The built-in model is stored by its name, since its path
    changes with the installation."""
    remember("model", GUIDE if name == str(guide_path()) else name)
