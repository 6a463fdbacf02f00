"""The models that a chat in the line mode can go over to."""

from __future__ import annotations

from collections.abc import Callable

from app.chat.configuration import with_other_model
from app.chat.settings import Settings
from app.chat.speed_history import recording_engine
from app.cli.model_file import model_path, remember_last_model
from engine.client import Engine
from engine.errors import ModelFileError
from engine.events import EngineOptions


class OtherModels:
    """`options` are those of the engine that the chat begins with."""

    def __init__(self, options: EngineOptions, settings: Settings) -> None:
        self._options, self._settings = options, settings

    def names(self) -> list[str]:
        """The names of the models on this machine. Reads the head of each file."""
        from app.chat.model_list import on_this_machine  # imports numpy

        return [model.name for model in on_this_machine(self._settings.names) if not model.problem]

    def engine(self, name: str, cancelled: Callable[[], bool]) -> Engine:
        """An engine for the model `name`, not started yet. It remembers the model when it is ready. Downloads a model
        that is not on this machine, until `cancelled` returns true. Raises OrinError."""
        from app.chat.model_list import read_entry

        path = model_path(name, self._settings, cancelled)
        model = read_entry(path, path)
        if model.problem:
            raise ModelFileError(model.problem)
        options = with_other_model(self._options, path, model.context_length)
        return recording_engine(options, lambda: remember_last_model(name, self._settings))
