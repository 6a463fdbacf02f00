"""The actions that replace the engine while the conversation stays: another preset, another model, a comparison."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from textual import work
from textual.app import App
from textual.screen import Screen

from app.chat.configuration import sampling_with_other_model
from app.chat.session import Session
from app.chat.settings import remember_model
from app.comparison.comparison_engine import ComparisonEngine
from app.screens.chat_column import ChatColumn
from app.screens.dashboard import Dashboard
from app.screens.engine_setup import EngineSetup
from app.screens.pages.presets import PresetsScreen
from engine.errors import OrinError, UsageError
from engine.protocol.client import Engine
from engine.protocol.events import Chat, Effort
from widgets.text import one_line

if TYPE_CHECKING:
    from app.chat.download import Download
    from app.chat.model_list import Entry


BOTH = "Both answer from the next prompt on · F10 leaves the comparison"


class EngineActions(App[None]):
    """A part of `ChatApp`. `setup` is None for an engine that has no presets and models here."""

    session: Session
    setup: EngineSetup | None
    column: ChatColumn
    page: Screen[Any]
    dashboard: Dashboard
    _download: Download | None = None  # of a model; it goes on when the page of models is closed

    # --- presets ----------------------------------------------------------------------------------------

    def action_next_backend(self) -> None:
        self.switch_preset(EngineSetup.next_backend)

    def action_next_beam(self) -> None:
        self.switch_preset(EngineSetup.next_beam)

    @work(group="presets", exclusive=True)
    async def action_presets(self) -> None:
        if self.setup is None:
            self.column.notice("This engine has no presets")
        elif name := await self.push_screen_wait(PresetsScreen(self.setup)):
            self.switch_preset(lambda _: name)

    def switch_preset(self, choose: Callable[[EngineSetup], str]) -> None:
        """Switches to the preset whose name `choose` returns."""
        if (setup := self.setup) is None:
            self.column.notice("This engine has no presets")
            return
        try:
            name = choose(setup)
            engine, options, sampling = setup.with_preset(name)
        except UsageError as error:
            self.column.notice(str(error), warning=True)
            return

        def adopt() -> None:
            setup.adopt(name, options)
            self.session.sampling = sampling
            self.dashboard.show_preset()

        self.session.switch(self._compared_as_now(setup, engine), name, adopt)

    def set_effort(self, effort: Effort | None) -> None:
        """Sets how much the model should think (None: as its chat template has it), from the next prompt on. It stays
        with another preset, unless that says otherwise."""
        self.session.sampling = replace(self.session.sampling, effort=effort)
        if self.setup is not None:
            self.setup.command_line = {**self.setup.command_line, "effort": effort}

    # --- models -----------------------------------------------------------------------------------------

    def action_models(self) -> None:
        self.models()

    @work(group="models", exclusive=True)
    async def models(self, search: str = "") -> None:
        if (setup := self.setup) is None:
            self.column.notice("This engine has no other models")
            return
        from app.screens.pages.models import ModelsScreen  # imports numpy

        backend = setup.options.backend
        screen = ModelsScreen(
            setup.models, setup.model_path, backend=backend, download=self._download, search=search
        )
        model = await self.push_screen_wait(screen)
        self._download = screen.download
        if model is not None:
            self._use_model(setup, model)

    @work(group="model", exclusive=True)
    async def model_named(self, name: str) -> None:
        """Goes over to the model `name` if that is here and usable; else opens the page of models with a search."""
        from app.screens.pages.models import usable_model  # imports numpy

        if (setup := self.setup) is not None:
            model = await asyncio.to_thread(usable_model, name, setup.models, setup.options.backend)
            if model is not None:
                self._use_model(setup, model)
                return
        self.models(name)

    def _use_model(self, setup: EngineSetup, model: Entry) -> None:
        if (path := model.path) is None:
            return
        if path == setup.model_path:
            self.column.notice(f"{one_line(model.name)} is in use already")
            return
        engine, options = setup.with_model(path)

        def adopt() -> None:
            self.session.sampling = sampling_with_other_model(self.session.sampling, setup.model_path, path)
            setup.adopt(setup.name, options)
            remember_model(str(path) if isinstance(model.source, Path) else model.name)
            self.dashboard.show_preset()
            self.run_worker(self._count_tokens(setup, path), group="count", exclusive=True)

        self.session.switch(self._compared_as_now(setup, engine), one_line(model.name), adopt)

    async def _count_tokens(self, setup: EngineSetup, model: Path) -> None:
        """Shows how much of the context the conversation takes with the tokenizer and template of another model."""
        session = self.session
        if not session.conversation.turns:
            return
        from engine.formats.templates.prompt import tokens_in

        prompt = Chat(messages=session.conversation.messages(), think=session.think)
        with contextlib.suppress(OrinError):  # the next prompt will show the error
            tokens = await asyncio.to_thread(tokens_in, prompt, model)
            if not session.is_busy and setup.model_path == model:
                session.status.new_conversation(context_used=tokens)

    def report_download(self) -> None:
        """Says once that a download has ended, if no page is open."""
        download = self._download
        if download is not None and download.is_over and len(self.screen_stack) == 1:
            self._download = None
            if download.error is not None:
                self.column.notice(f"{download.name}: {download.error}", warning=True)
            elif download.path is not None:
                self.column.notice(f"{download.name} is here · Ctrl+L chooses it", seconds=60)

    # --- context ----------------------------------------------------------------------------------------

    def action_lengthen(self) -> None:
        """Goes over to the longest context, and on with the reply that was cut or missing for want of room."""
        if (setup := self.setup) is None:
            self.column.notice("The context of this engine is set where it runs")
        elif self._is_context_trained():
            self.column.notice(
                "The context is as long as the model was trained for: Ctrl+L chooses a model with a longer one"
            )
        elif setup.options.context_length == "max":
            self.column.notice("There is no memory for a longer context: Ctrl+L chooses a smaller model")
        else:
            self.switch_options("the longest context", context_length="max")

    def _is_context_trained(self) -> bool:
        """Whether the context is all that the model was trained for."""
        status = self.session.status.snapshot()
        return 0 < status.ready.model.trained_context <= status.context_length

    def switch_options(self, name: str, **changed: Any) -> None:
        """Goes over to an engine with other options, which the user knows by `name`. A reply that was cut for want of
        room goes on then."""
        if (setup := self.setup) is None:
            self.column.notice("The options of this engine are set where it runs")
            return
        engine, options = setup.with_options(**changed)
        session, was_full = self.session, self.session.is_full

        def adopt() -> None:
            setup.adopt(setup.name, options)
            setup.command_line = {**setup.command_line, **changed}
            if was_full:
                self.call_later(self.run_action, "go_on")

        session.switch(self._compared_as_now(setup, engine), f"the engine with {name}", adopt)

    # --- comparison -------------------------------------------------------------------------------------

    @property
    def is_comparing(self) -> bool:
        return isinstance(self.session.engine, ComparisonEngine)

    def toggle_comparison(self) -> None:
        """Begins or ends the comparison with llama.cpp."""
        session, engine, notice = self.session, self.session.engine, self.column.notice
        if self.column.refuse_while_busy():
            return
        if session.candidate is not None:
            notice(f"Esc gives up {session.candidate.name} first")
        elif isinstance(engine, ComparisonEngine):
            session.engine = engine.ours
            notice("llama.cpp is closed; orin-chat goes on")
            self.run_worker(engine.release())
        elif self.setup is None:
            notice("Only an engine of orin-chat's own can be compared with llama.cpp")
        else:
            session.engine = comparison = self.setup.compare(engine)
            notice(BOTH, seconds=15)
            if session.status.is_ready:  # else the next prompt starts both
                self.run_worker(self._start_comparison(comparison))

    async def _start_comparison(self, comparison: ComparisonEngine) -> None:
        """If the other engine does not start, a notice says why, and the comparison is left: an empty column would
        take half of the screen. While a prompt is answered, that column says it."""
        async for _ in comparison.start():
            pass
        session, problem = self.session, await comparison.peer_problem()
        if not problem or session.engine is not comparison:
            return
        if session.is_answering:
            self.column.notice("")
        else:
            session.engine = comparison.ours
            self.show_comparison()
            self.column.notice(problem, warning=True, seconds=60)
            await comparison.release()

    def show_comparison(self) -> None:
        """A comparison takes the place of the chat, and of the dashboard until the user asks for that."""
        self.column.show_status()
        self.page.set_class(self.is_comparing, "-comparing")

    def toggle_together(self) -> None:
        """Lets the engines of a comparison answer at the same time, or again in turn."""
        if isinstance(pair := self.session.engine, ComparisonEngine):
            pair.together = not pair.together
            order = "together" if pair.together else "in turn"
            self.column.notice(f"From the next prompt on they answer {order}")

    def _compared_as_now(self, setup: EngineSetup, engine: Engine) -> Engine:
        """`engine`, in a comparison if the one in use is in one."""
        pair = self.session.engine
        return setup.compare(engine, together=pair.together) if isinstance(pair, ComparisonEngine) else engine
