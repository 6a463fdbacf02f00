"""The models and options that a chat in the line mode can go over to."""

from collections.abc import Callable
from typing import Any

from app.chat.configuration import with_changes, with_other_model
from app.chat.settings import Settings
from app.chat.speed_history import recording_engine
from app.cli.model_file import model_path, remember_last_model
from engine.errors import ModelFileError
from engine.protocol.client import Engine
from engine.protocol.events import EngineOptions


class OtherModels:
    """`options` are those of the engine in use."""

    def __init__(self, options: EngineOptions, settings: Settings) -> None:
        self.options, self._settings = options, settings

    def names(self) -> list[str]:
        """The names of the models on this machine. Reads the head of each file."""
        from app.chat.model_list import on_this_machine  # imports numpy

        return [model.name for model in on_this_machine(self._settings.names) if not model.problem]

    def engine(self, name: str, cancelled: Callable[[], bool]) -> tuple[Engine, EngineOptions]:
        """An engine for the model `name`, not started yet, and its options. It remembers the model when it is ready.
        Downloads a model that is not on this machine, until `cancelled` returns true. Raises OrinError."""
        from app.chat.model_list import read_entry

        path = model_path(name, self._settings, cancelled)
        model = read_entry(path, path)
        if model.problem:
            raise ModelFileError(model.problem)
        options = with_other_model(self.options, path)
        return recording_engine(options, lambda: remember_last_model(name, self._settings)), options

    def with_options(self, **changed: Any) -> tuple[Engine, EngineOptions]:
        """An engine for the same model with other options, not started yet, and these options."""
        options = with_changes(self.options, **changed)
        return recording_engine(options), options

    def adopt(self, options: EngineOptions) -> None:
        """An engine with these options is in use now."""
        self.options = options
