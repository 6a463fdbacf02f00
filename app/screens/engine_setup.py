"""How the engine is set up: the preset in use, and what else this machine and this model can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from app.chat import speed_history
from app.chat.configuration import configure
from app.chat.settings import Settings
from app.chat.speed_history import recording_engine
from engine.backends import BACKENDS, unusable_because
from engine.client import Engine, LocalEngine
from engine.errors import UsageError
from engine.events import EngineOptions, Sampling
from presets.loader import Entry, Preset, entries, find
from widgets.preset_bar import BarOption, PresetBarData

if TYPE_CHECKING:
    from app.comparison.comparison_engine import ComparisonEngine

ORDER = ("NV", "CUDA", "CPU")


@dataclass(frozen=True)
class PresetListing:
    """A preset to choose. `problem` says why it cannot be had, "" where it can."""

    name: str
    title: str
    path: Path
    built_in: bool
    is_active: bool
    problem: str
    speeds: str


class EngineSetup:
    """`options` are what the engine in use was started with, under the preset `name` ("" for none). `settings` and
    `command_line` (see `configure`) hold for other presets, too. `llama_server` is what to compare with (a program,
    or the address of one that runs and wants `api_key`; "": the one that is found). `make` makes an engine of options
    and starts nothing."""

    def __init__(
        self,
        options: EngineOptions,
        name: str = "",
        *,
        settings: Settings = Settings(),  # noqa: B008 (immutable)
        command_line: Mapping[str, Any] = {},
        llama_server: str = "",
        api_key: str = "",
        make: Callable[[EngineOptions], Engine] = recording_engine,
        flaw: Callable[[str], str] = unusable_because,
    ) -> None:
        self.options, self.name = options, name
        self.models = settings.names
        self.backend = ""  # the one in use, as the engine told
        self._settings, self._command_line = settings, command_line
        self._llama_server, self._api_key = llama_server, api_key
        self._make, self._flaw = make, flaw
        self._flaws: dict[str, str] = {}

    @property
    def model_path(self) -> Path:
        return Path(self.options.model_path)

    def examine(self) -> None:
        """Finds out which backends work here. Takes up to a second, and may be called in a thread."""
        self._flaws = {backend: self._flaw(backend) for backend in BACKENDS}

    def engine(self, name: str) -> tuple[Engine, EngineOptions, Sampling]:
        """An engine under a preset, what it is started with, and the sampling it asks for. Raises UsageError."""
        if problem := self._problem(found := find(name)):
            raise UsageError(f"{name} cannot be had here: {problem}.")
        options, sampling = configure(
            self.options.model_path, self._settings, found, self._command_line, chosen_in_chat=True
        )
        return self._make(options), options, sampling

    def with_model(self, path: Path, trained_context: int = 0) -> tuple[Engine, EngineOptions]:
        """An engine set up as this one for another model, and what it is started with. A context that is
        longer than the model was trained for (0: not known) is as long as that."""
        length = self.options.context_length
        if length and trained_context:
            length = min(length, trained_context)
        options = replace(self.options, model_path=str(path), context_length=length)
        return self._make(options), options

    def compare(self, ours: Engine, *, together: bool = False) -> ComparisonEngine:
        """`ours` (of `make`) and llama.cpp, as one engine."""
        from app.comparison.comparison_engine import compare_with_llama_server  # imports an HTTP client

        assert isinstance(ours, LocalEngine)
        return compare_with_llama_server(ours, self._llama_server, api_key=self._api_key, together=together)

    def started(self, backend: str) -> None:
        """The engine in use runs on `backend`. Without a preset it is set up as the one called after that."""
        self.backend = backend
        usual = configure(self.options.model_path, self._settings).engine
        plain = replace(self.options, backend=usual.backend, context_length=usual.context_length)
        if not self.name and plain == usual and backend.lower() in entries():
            self.name = backend.lower()

    def adopt(self, name: str, options: EngineOptions) -> None:
        """The engine in use is another one now."""
        self.name, self.options = name, options

    def note_speed(self, decode: float | None, prefill: float | None) -> None:
        if self.name:
            speed_history.record_run(self.model_path, self.name, decode=decode, prefill=prefill)

    # --- what there is to choose ------------------------------------------------------------------------

    def listings(self) -> list[PresetListing]:
        known = speed_history.preset_speeds(self.model_path)
        return [self._offer(entry, str(known.get(entry.name, ""))) for entry in entries().values()]

    def _offer(self, entry: Entry, speeds: str) -> PresetListing:
        preset = entry.preset
        return PresetListing(
            name=entry.name,
            title=preset.title if preset else "",
            path=entry.path,
            built_in=entry.built_in,
            is_active=entry.name == self.name,
            problem=entry.problem if preset is None else self._problem(preset),
            speeds=speeds,
        )

    def view(self) -> PresetBarData:
        width = _search_width(self._current)
        widths = sorted(
            {_search_width(preset) for preset in self._of_backend(self._backend).values()} | {width}
        )
        found = speed_history.preset_speeds(self.model_path).get(self.name) if self.name else None
        return PresetBarData(
            name=self.name,
            backends=tuple(
                BarOption(backend, backend == self._backend, self._flaws.get(backend, ""))
                for backend in ORDER
            ),
            beams=tuple(BarOption(str(n), n == width) for n in widths),
            speeds=found.summaries if found else (),
        )

    def next_backend(self) -> str:
        """The preset of the next backend that works here, in the order NV, CUDA, CPU. Raises UsageError."""
        start = ORDER.index(self._backend) if self._backend in ORDER else -1
        for step in range(1, len(ORDER)):
            backend = ORDER[(start + step) % len(ORDER)]
            if self._flaws.get(backend):
                continue
            presets = self._of_backend(backend)
            if found := min(presets, key=lambda name: (_search_width(presets[name]), name), default=None):
                return found
        reasons = "; ".join(f"{backend}: {why}" for backend, why in self._flaws.items() if why)
        raise UsageError("No other backend works here.", f"{reasons}." if reasons else "")

    def next_beam(self) -> str:
        """The preset of this backend with the next width of the search. Raises UsageError."""
        presets = self._of_backend(self._backend)
        names = sorted(presets, key=lambda name: (_search_width(presets[name]), name))
        widths = {_search_width(preset): name for name, preset in reversed([(n, presets[n]) for n in names])}
        wider = [n for n in sorted(widths) if n > _search_width(self._current)]
        if len(widths) < 2:
            raise UsageError(
                f"There is no preset that searches on {self._backend or 'this backend'}.", "F8 makes one."
            )
        return widths[wider[0] if wider else min(widths)]

    @property
    def _backend(self) -> str:
        named = self.options.backend.upper()
        return named if named in ORDER else self.backend.partition(":")[0].upper()

    @property
    def _current(self) -> Preset | None:
        entry = entries().get(self.name)
        return entry.preset if entry else None

    def _of_backend(self, backend: str) -> dict[str, Preset]:
        found = ((entry.name, entry.preset) for entry in entries().values())
        return {name: preset for name, preset in found if preset and preset.backend == backend}

    def _problem(self, preset: Preset) -> str:
        return self._flaws.get(preset.backend, "")


def _search_width(preset: Preset | None) -> int:
    return 0 if preset is None else preset.search_width
