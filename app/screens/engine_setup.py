"""The configuration of the engine in use, and the presets, backends and models that it can be replaced by."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from app.chat.configuration import configure, with_changes, with_other_model
from app.chat.idle_tuner import WhenIdle
from app.chat.settings import Settings
from app.chat.speed_history import preset_speeds, record_run, recording_engine
from app.comparison.comparison_engine import ComparisonEngine, compare_with_llama_server
from engine.backends import BACKENDS, unusable_because
from engine.errors import UsageError
from engine.protocol.client import Engine, LocalEngine
from engine.protocol.events import EngineOptions, Sampling
from presets.loader import Preset, find_preset, preset_files
from widgets.dashboard.preset_bar import BarOption, PresetBarData

ORDER = ("NV", "CUDA", "CPU")


class EngineSetup:
    """The engine in use was started with `options`, under the preset `name` ("": none)."""

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
        unusable_because: Callable[[str], str] = unusable_because,
    ) -> None:
        """`settings` and `command_line` (see `configure`) also hold for other presets. `llama_server` is the program to
        compare with, or the address of a running one with its `api_key`; "" looks for the program. `make` makes an
        engine and does not start it. `unusable_because` says why a backend does not work here, "" if it does."""
        self.options, self.name = options, name
        self.models = settings.names
        self.backend = ""  # as the engine reported it
        self._settings, self.command_line = settings, command_line
        self._llama_server, self._api_key = llama_server, api_key
        self._make, self._unusable_because = make, unusable_because
        self._problems: dict[str, str] = {}  # by backend, once they are checked

    @property
    def model_path(self) -> Path:
        return Path(self.options.model_path)

    @property
    def search_when_idle(self) -> WhenIdle:
        """When the engine in use searches for faster kernels: as its preset says, else the settings."""
        file = preset_files().get(self.name)
        own = file.preset.search_when_idle if file and file.preset else None
        return own or self._settings.search_when_idle

    def check_backends(self) -> None:
        """Finds out which backends work here. Takes up to a second; may be called in a thread."""
        self._problems = {backend: self._unusable_because(backend) for backend in BACKENDS}

    # --- other engines ----------------------------------------------------------------------------------

    def with_preset(self, name: str) -> tuple[Engine, EngineOptions, Sampling]:
        """An engine for the same model under a preset, its options, and the sampling. Raises UsageError."""
        preset = find_preset(name)
        if problem := self.problem(preset):
            raise UsageError(f"{name} does not work here: {problem}.")
        path, given = self.options.model_path, self.command_line
        options, sampling, *_ = configure(path, self._settings, preset, given, chosen_in_chat=True)
        at_most = options.context_at_most or self.options.context_at_most  # of another model by now
        beside = {name: getattr(self.options, name) for name in ("mmproj", "draft", "lora")}
        options = replace(options, context_at_most=at_most, **beside)
        return self._make(options), options, sampling

    def with_model(self, path: Path) -> tuple[Engine, EngineOptions]:
        """An engine for another model, and its options."""
        options = with_other_model(self.options, path)
        return self._make(options), options

    def with_options(self, **changed: Any) -> tuple[Engine, EngineOptions]:
        """An engine for the same model with other options, and these."""
        options = with_changes(self.options, **changed)
        return self._make(options), options

    def compare(self, ours: Engine, *, together: bool = False) -> ComparisonEngine:
        """`ours` (an engine of `make`) and llama.cpp as one engine."""
        assert isinstance(ours, LocalEngine)
        return compare_with_llama_server(ours, self._llama_server, api_key=self._api_key, together=together)

    def engine_ready(self, backend: str) -> None:
        """The engine in use runs on `backend`. If no preset was chosen, and the options are those of the preset that is
        called like the backend, that preset is in use."""
        self.backend = backend
        default = configure(self.options.model_path, self._settings).engine
        # what presets of backends leave open
        other = (
            "backend",
            "context_length",
            "context_at_most",
            "kv",
            "prefix_cache_bytes",
            "mmproj",
            "draft",
            "lora",
        )
        options = replace(self.options, **{name: getattr(default, name) for name in other})
        if not self.name and options == default and backend.lower() in preset_files():
            self.name = backend.lower()

    def adopt(self, name: str, options: EngineOptions) -> None:
        """Another engine is in use now."""
        self.name, self.options = name, options

    def record_speed(self, decode: float | None, prefill: float | None) -> None:
        """Records the speeds of an answer, in tokens/s, under the preset in use."""
        if self.name:
            record_run(self.model_path, self.name, decode=decode, prefill=prefill)

    # --- presets ----------------------------------------------------------------------------------------

    def bar(self) -> PresetBarData:
        widths = {preset.search_width for preset in self._presets_of(self._backend).values()} | {self._width}
        speeds = preset_speeds(self.model_path).get(self.name) if self.name else None
        backends = (BarOption(name, name == self._backend, self._problems.get(name, "")) for name in ORDER)
        return PresetBarData(
            name=self.name,
            backends=tuple(backends),
            beams=tuple(BarOption(str(width), width == self._width) for width in sorted(widths)),
            speeds=speeds.summaries if speeds else (),
        )

    def next_backend(self) -> str:
        """The preset of the next backend that works here, in the order NV, CUDA, CPU. Raises UsageError."""
        start = ORDER.index(self._backend) + 1 if self._backend in ORDER else 0
        all_presets = {backend: self._presets_of(backend) for backend in (*ORDER[start:], *ORDER[:start])}
        working = [name for name, presets in all_presets.items() if presets and not self._problems.get(name)]
        others = [backend for backend in working if backend != self._backend]
        if others and (self._backend or len(others) > 1):  # the only one is that which is starting
            presets = all_presets[others[0]]
            return min(presets, key=lambda name: (presets[name].search_width, name))
        reasons = "; ".join(f"{backend}: {problem}" for backend, problem in self._problems.items() if problem)
        raise UsageError("No other backend works here.", f"{reasons}." if reasons else "")

    def next_beam(self) -> str:
        """The preset of this backend with the next search width. Raises UsageError."""
        presets = self._presets_of(self._backend)
        by_width = {presets[name].search_width: name for name in sorted(presets, reverse=True)}
        if len(by_width) < 2:
            backend = self._backend or "this backend"
            raise UsageError(f"There is no preset that searches on {backend}.", "F8 makes one.")
        wider = [width for width in by_width if width > self._width]
        return by_width[min(wider or by_width)]

    @property
    def _backend(self) -> str:
        chosen = self.options.backend.upper()
        return chosen if chosen in ORDER else self.backend.partition(":")[0].upper()

    @property
    def _width(self) -> int:
        entry = preset_files().get(self.name)
        return entry.preset.search_width if entry and entry.preset else 0

    def _presets_of(self, backend: str) -> dict[str, Preset]:
        presets = ((entry.name, entry.preset) for entry in preset_files().values())
        return {name: preset for name, preset in presets if preset and preset.backend == backend}

    def problem(self, preset: Preset | None) -> str:
        """Why a preset does not work here; "" if it does."""
        return self._problems.get(preset.backend, "") if preset else ""
