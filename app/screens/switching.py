"""Other engines in mid-conversation: another preset, another model, a comparison and back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App

from app.chat.session import Session
from app.chat.settings import remember_model
from app.comparison.engine_pair import EnginePair
from app.screens.engine_setup import EngineSetup
from app.screens.presets import PresetsScreen
from engine.client import Engine
from engine.errors import OrinError, UsageError
from engine.events import Chat
from widgets.text import one_line

if TYPE_CHECKING:
    from app.chat.downloading import Download


class Switching:
    """What `session` goes over to, the conversation kept. `setup` is None where the engine is set up
    elsewhere. `tell` says something in a line, `adopted` is called when another engine is in use."""

    def __init__(
        self,
        app: App[Any],
        session: Session,
        setup: EngineSetup | None,
        tell: Callable[..., None],
        adopted: Callable[[], None],
    ) -> None:
        self._app, self._session, self._setup = app, session, setup
        self._tell, self._adopted = tell, adopted
        self._download: Download | None = None  # of a model, which goes on beside the chat

    # --- presets ----------------------------------------------------------------------------------------

    def next_backend(self) -> None:
        if setup := self._presets():
            self._to_preset(setup, setup.next_backend)

    def next_beam(self) -> None:
        if setup := self._presets():
            self._to_preset(setup, setup.next_beam)

    async def choose_preset(self) -> None:
        if (setup := self._presets()) and (name := await self._app.push_screen_wait(PresetsScreen(setup))):
            self._to_preset(setup, lambda: name)

    def _presets(self) -> EngineSetup | None:
        if self._setup is None:
            self._tell("This engine has no presets")
        return self._setup

    def _to_preset(self, setup: EngineSetup, choose: Callable[[], str]) -> None:
        try:
            name = choose()
            engine, options, sampling = setup.engine(name)
        except UsageError as error:
            self._tell(str(error), warning=True)
            return

        def adopt() -> None:
            setup.adopt(name, options)
            self._session.sampling = sampling
            self._adopted()

        self._session.switch(self._as_now(setup, engine), name, adopt)

    # --- models -----------------------------------------------------------------------------------------

    async def choose_model(self) -> None:
        if (setup := self._setup) is None:
            self._tell("This engine has no other models")
            return
        from app.screens.models import ModelsScreen  # and numpy: not before they are needed

        backend = setup.options.backend
        screen = ModelsScreen(setup.models, setup.model_path, backend=backend, download=self._download)
        chosen = await self._app.push_screen_wait(screen)
        self._download = screen.download
        if chosen is None or chosen.path is None or chosen.path == setup.model_path:
            return
        path, name = chosen.path, one_line(chosen.name)
        engine, options = setup.with_model(path, chosen.context_length)

        def adopt() -> None:
            setup.adopt(setup.name, options)
            remember_model(str(path) if isinstance(chosen.source, Path) else chosen.name)
            self._adopted()
            self._app.run_worker(self._count_tokens(setup, path), group="count", exclusive=True)

        self._session.switch(self._as_now(setup, engine), name, adopt)

    async def _count_tokens(self, setup: EngineSetup, model: Path) -> None:
        """How much of the context the conversation takes, in the words and the template of another model."""
        session = self._session
        if not session.conversation.turns:
            return
        from engine.formats.prompt import tokens_in

        prompt = Chat(messages=session.conversation.messages(), think=session.think)
        with contextlib.suppress(OrinError):  # the next prompt will say it better
            tokens = await asyncio.to_thread(tokens_in, prompt, model)
            if not session.is_busy and setup.model_path == model:
                session.status.new_conversation(context_used=tokens)

    def tell_of_download(self) -> None:
        """That a download has come to its end, which the screen of models left going on."""
        if self._download is not None and self._download.is_over and len(self._app.screen_stack) == 1:
            download, self._download = self._download, None
            if download.error is not None:
                self._tell(f"{download.name}: {download.error}", warning=True)
            elif download.path is not None:
                self._tell(f"{download.name} is here · Ctrl+L chooses it", seconds=60)

    # --- comparison -------------------------------------------------------------------------------------

    @property
    def is_comparing(self) -> bool:
        return isinstance(self._session.engine, EnginePair)

    def compare(self) -> None:
        """Has llama.cpp answer too, or no longer."""
        session, engine = self._session, self._session.engine
        if session.is_busy:
            self._tell(
                "Esc stops the reply first"
                if session.is_answering
                else "The engine is still starting; F10 again when it is ready"
            )
        elif session.candidate is not None:
            self._tell(f"Esc gives up {session.candidate.name} first")
        elif isinstance(engine, EnginePair):
            session.engine = engine.ours
            self._tell("llama.cpp is closed; orin-chat goes on")
            self._app.run_worker(_released(engine))
        elif self._setup is None:
            self._tell("Only an engine of orin-chat's own can be compared with llama.cpp")
        else:
            session.engine = comparison = self._setup.compare(engine)
            self._tell("Both answer from the next prompt on · F10 leaves the comparison", seconds=15)
            if session.status.is_ready:  # else the next prompt starts both
                self._app.run_worker(_started(comparison))

    def answer_together(self) -> None:
        """From the next prompt on at the same time or, where they do, in turn."""
        if isinstance(engine := self._session.engine, EnginePair):
            engine.together = not engine.together
            self._tell(f"From the next prompt on they answer {'together' if engine.together else 'in turn'}")

    def _as_now(self, setup: EngineSetup, engine: Engine) -> Engine:
        """`engine`, compared where the one in use is."""
        now = self._session.engine
        return setup.compare(engine, together=now.together) if isinstance(now, EnginePair) else engine


async def _started(comparison: Engine) -> None:
    async for _ in comparison.start():
        pass


async def _released(comparison: EnginePair) -> None:
    await comparison.release()
