"""What the user prefers (settings.toml, only read) and what orin-chat remembers (the last model, the theme)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import platformdirs

from engine.errors import UsageError
from engine.events import Sampling
from presets import GUIDE, guide_path
from presets.sampling import out_of_range


class SamplingSettings(Sampling, frozen=True, kw_only=True, tag="Sampling", forbid_unknown_fields=True):
    """`Sampling` as the file spells it: a key that does not exist is an error."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of settings.toml and their defaults; [sampling] and [models] are tables."""

    model: str = ""
    preset: str = ""
    backend: str = "auto"
    context: int | None = None
    system: str = ""
    llama_server: str = ""  # the program to compare with
    keep_packed: bool = False  # weights as the CPU's kernels read them, on disk for the next start
    models: dict[str, str] = {}  # names of the user's own, for files and addresses
    sampling: SamplingSettings = SamplingSettings()

    @property
    def names(self) -> dict[str, str]:
        """What models are called here: the built-in one, and the user's own names."""
        return {GUIDE: str(guide_path()), **self.models}


def settings_path() -> Path:
    return platformdirs.user_config_path("orin-chat", appauthor=False) / "settings.toml"


def load_settings(path: Path | None = None) -> Settings:
    """The settings in `path` (None: `settings_path()`), or the defaults where there is no such file.

    Raises UsageError, naming file and key, when it cannot be read or does not hold what it should.
    """
    path = path or settings_path()
    try:
        settings = msgspec.toml.decode(path.read_bytes(), type=Settings)
        check_sampling(settings.sampling)
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError, UsageError) as error:  # msgspec's errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UsageError(f"The settings in {path} cannot be used: {reason}.") from error
    return settings


def check_sampling(sampling: Sampling) -> None:
    """Raises UsageError, naming the option and its range, for a value that sampling cannot work with."""
    if flaw := out_of_range(sampling):
        raise UsageError(f"{flaw}.")


# --- what is remembered --------------------------------------------------------------------------------


def remembered(what: str) -> str:
    """What `remember` was told last; "" when there is nothing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _remembered_path(what).read_text("utf-8").strip()
    return ""


def remember(what: str, value: str) -> None:
    """Keeps `value`, a line, from one run to the next. A state folder that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        _remembered_path(what).parent.mkdir(parents=True, exist_ok=True)
        _remembered_path(what).write_text(f"{value}\n", "utf-8")


def _remembered_path(what: str) -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / f"last-{what}"


def last_model() -> str:
    """The path or the name of the model used last; "" when there is none."""
    return remembered("model")


def remember_model(name: str) -> None:
    """Keeps a path or a name as the model used last; the built-in one by its name, since where it lies changes
    with the installation."""
    remember("model", GUIDE if name == str(guide_path()) else name)
