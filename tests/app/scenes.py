"""Moments of the chat that are worth a picture: for the snapshot tests and for the README."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import log

from msgspec.structs import replace
from textual._context import visible_screen_stack
from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import TextArea

from app.chat.history import History
from app.comparison.comparison_engine import ComparisonEngine
from app.screens import frame_pacer
from app.screens.chat_app import WIDE_WIDTH, ChatApp
from app.screens.engine_setup import EngineSetup
from engine.formats.templates.template import Prompt
from engine.protocol.client import Engine
from engine.protocol.events import (
    Counter,
    EngineOptions,
    Event,
    Failed,
    Finished,
    Loading,
    Measured,
    Message,
    Prefilling,
    Token,
    TopToken,
)
from tests.app.fake_engine import (
    CHOICES,
    DIED,
    READY,
    STARTED,
    WITH_EXPERTS,
    FakeEngine,
    MeasuredEngine,
    reply,
)
from tests.waiting import until
from widgets.dashboard.machine_panel import MachinePanel, MachineState

NOW = datetime(2026, 5, 7, 14, 5)
QUESTION = "Why are there two tides a day, and can I compute them?"
THOUGHT = """\
The user asks why there are two tides a day, not one. The point is that tides come from the difference of \
the Moon's pull across the Earth. Then a small formula: two sines, lunar and solar, with periods of 12.42 \
and 12 hours. I should say that coasts resonate, so that real tables are fitted to measurements.
"""
ANSWER = """\
Because the Moon pulls on the near side of the Earth **more** than on its middle, and on the middle more \
than on the far side: the water is stretched into *two* bulges, and the Earth turns under both.

1. The Moon's part repeats every 12 h 25 min, half of a lunar day.
2. The Sun's part is `46 %` as strong and repeats every 12 h:
   - together at new and full moon: *spring* tides
   - against each other at half moon: *neap* tides

A first approximation is the sum of two sines:

```python
from math import pi, sin

def tide_m(t_h: float) -> float:
    \"\"\"Height in metres, t_h hours after a spring high tide.\"\"\"
    moon = 1.00 * sin(2 * pi * t_h / 12.42 + pi / 2)
    return moon + 0.46 * sin(2 * pi * t_h / 12.00 + pi / 2)
```

Coasts *resonate*, so real tide tables are fitted to measurements with dozens of such terms.
"""


COUNTERS = (
    Counter(name="GPU load", value=97, unit="%", maximum=100),
    Counter(name="memory activity", value=71, unit="%", maximum=100),
    Counter(name="GPU clock", value=1755, unit="MHz", maximum=1980),
    Counter(name="temperature", value=61, unit="°C"),
    Counter(name="power", value=412.5, unit="W", maximum=700),
    Counter(name="throttled", text="no"),
    Counter(name="CPU load", value=12, unit="%", maximum=100),
    Counter(name="CPU clock", absent="this machine does not tell"),
)


@dataclass(frozen=True)
class Scene:
    """A chat of one size, what the engine says in it, and what the user does (`act`) until the picture."""

    size: tuple[int, int]
    replies: Sequence[Sequence[Event | None]]
    prompt: str = ""
    start: Sequence[Event | None] = STARTED
    shows: str = ""
    act: Callable[[ChatApp, Pilot[None]], Awaitable[None]] | None = None
    theme: str = ""
    with_past_chats: bool = False
    counters: Sequence[Counter] = COUNTERS
    peer: Callable[[], FakeEngine] | None = None
    earlier: bool = False  # whether there were answers before, on another engine

    def app(self) -> ChatApp:
        engine = MeasuredEngine(*self.replies, start=self.start)
        history = past_chats() if self.with_past_chats else History(":memory:")
        flaws = {"NV": "there is no NVIDIA kernel driver (/dev/nvidiactl)"}
        setup = EngineSetup(
            EngineOptions(model_path="/models/qwen3.gguf", backend="CUDA"),
            "cuda",
            make=lambda _: MeasuredEngine(),
            unusable_because=lambda backend: flaws.get(backend, ""),
        )
        if self.peer is not None:
            setup.compare = beside(self.peer())  # type: ignore[method-assign]
        setup.record_speed = lambda decode, prefill: None  # type: ignore[method-assign]
        app = ChatApp(
            engine,
            history,
            initial_prompt=self.prompt,
            setup=setup,
            read_counters=lambda: tuple(self.counters),
            clock=engine.clock,
        )
        if self.earlier:
            for engine.seconds, event in earlier_answers():
                app.dashboard.performance.observe(event)
            engine.seconds = 1000.0
        if self.theme:
            app.theme = self.theme
        return app

    async def play(self, pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, ChatApp)
        app.prompt.cursor_blink = False
        await sees(pilot, self.shows)
        await settled(pilot)
        if self.act is not None:
            await self.act(app, pilot)
        await settled(pilot)


def beside(peer: FakeEngine) -> Callable[..., ComparisonEngine]:
    """What `EngineSetup.compare` does, with `peer` in llama-server's place."""

    def compare(ours: Engine, *, together: bool = False) -> ComparisonEngine:
        return ComparisonEngine(ours, lambda _: peer, lambda: lambda *_: Prompt([1, 2, 3]), together=together)  # type: ignore[arg-type]

    return compare


async def sees(pilot: Pilot[None], text: str) -> None:
    """Waits for `text`, wherever its lines are broken."""
    words = lambda text: " ".join(text.split())
    shows = lambda: words(text) in words("\n".join(strip.text for strip in drawn(pilot.app)))
    await until(shows, lambda: f"{text!r} did not come")


def drawn(app: App[None]) -> list[Strip]:
    """The lines of the screen, with the screen that shows through behind it."""
    visible_screen_stack.set(app._background_screens)
    return app.screen._compositor.render_strips()


async def settled(pilot: Pilot[None]) -> None:
    """Waits until the screen has been the same for some frames, however slow the machine is."""
    seen, frames = None, 0
    while frames < 4:
        await pilot.pause(frame_pacer.FRAME_S / 2)
        before, seen = seen, drawn(pilot.app)
        frames = frames + 1 if seen == before else 0


def earlier_answers() -> Iterator[tuple[float, Event]]:
    """Three answers on the CPU in the minute before an engine's clock begins, and their times."""
    yield 940.0, replace(READY, backend="CPU")
    yield 940.0, Measured(request_id=0, copy_gbps=40.0, kernels_per_token=143, device_bytes=700_000_000)
    for began, prompt_n, seconds in ((946.0, 96, 7.0), (962.0, 500, 2.0), (975.0, 900, 12.0)):
        prefill_s, pieces = prompt_n / 400.0, round(60 * seconds)
        yield began, Prefilling(request_id=0, done=0, total=prompt_n, cached=0)
        for done in range(0, prompt_n, 50):
            yield began + done / 400.0, Prefilling(request_id=0, done=done, total=prompt_n, cached=0)
        for i in range(pieces):
            yield began + prefill_s + i / 60, Token(request_id=0, id=i, text="x")
        yield (
            began + prefill_s + seconds,
            Finished(
                request_id=0, reason="stop", prompt_n=prompt_n, cached_n=0, prompt_ms=prefill_s * 1e3,
                predicted_n=pieces, predicted_ms=seconds * 1e3, load_ms=0.0, seed=7,
            ),
        )  # fmt: skip


def past_chats() -> History:
    history = History(":memory:")
    for days, title, prompt, answer in (
        (
            400,
            "",
            "Explain the borrow checker to a Python programmer",
            "Ownership is a rule about who frees.",
        ),
        (40, "Sourdough", "How long does sourdough rise?", "Until it has doubled: four hours at 25 °C."),
        (2, "", "Why is the sea salty?", "Rivers bring salts, and only water leaves."),
        (0, "", QUESTION, ANSWER),
    ):
        chat_id = history.new_chat("Qwen3 0.6B")
        history.append(chat_id, Message(role="user", content=prompt))
        history.append(chat_id, Message(role="assistant", content=answer))
        history.rename(chat_id, title)
        updated = (NOW - timedelta(days=days, minutes=5)).timestamp()
        history._db.execute("UPDATE chats SET updated = ? WHERE id = ?", (updated, chat_id))
    return history


async def _queue_and_draft(app: ChatApp, pilot: Pilot[None]) -> None:
    app.prompt.insert("And on Mars?")
    await pilot.press("enter")
    app.prompt.insert("a draft\nof two lines")
    await sees(pilot, "next: And on Mars?")


async def _edit(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+t", "f2")


async def _full(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+g")
    await sees(pilot, "The context is full")


async def _past_chats(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+o")
    await sees(pilot, "Sourdough")


async def _measured(app: ChatApp, pilot: Pilot[None]) -> None:
    await sees(pilot, "143 kernels · ")
    await _sampled(app, pilot)


async def _sampled(app: ChatApp, pilot: Pilot[None]) -> None:
    """Returns when the graph shows the counters and all that the engine has told so far."""
    dashboard = app.dashboard

    def is_shown() -> bool:
        data = dashboard.graph.data
        return data is not None and "71" in data.memory and data == dashboard.performance.throughput(COUNTERS)

    await until(is_shown, lambda: "the counters were not read")


async def _dashboard(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("f5")
    await sees(pilot, "d s f p m ⏎")  # the table has the keys
    await _measured(app, pilot)


def _samples(state: MachineState) -> int:
    return min(map(len, state.history.values()), default=0)


def _whole(presses: int, *keys: str) -> Callable[[ChatApp, Pilot[None]], Awaitable[None]]:
    async def act(app: ChatApp, pilot: Pilot[None]) -> None:
        if app.size.width < WIDE_WIDTH:
            await pilot.press("f5")
        await _measured(app, pilot)
        await pilot.press(*["f9"] * presses)
        whole = app.dashboard.whole
        assert whole is not None
        await until(lambda: whole.size.width > app.size.width / 2, lambda: "the pane was not laid out")
        if isinstance(whole, MachinePanel):  # its graphs of earlier values fill what is left of a line
            await until(lambda: whole.data is not None and _samples(whole.data) > app.size.width / 2)
        if keys:  # they are the pane's
            await until(lambda: app.focused is whole)
            await pilot.press(*keys)

    return act


async def _kernel(app: ChatApp, pilot: Pilot[None]) -> None:
    await _whole(2, "enter")(app, pilot)
    await sees(pilot, "Esc closes")


async def _presets(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("f8")
    await sees(pilot, "Enter chooses")


async def _edit_preset(app: ChatApp, pilot: Pilot[None]) -> None:
    await _presets(app, pilot)
    await pilot.press("down", "f2")
    await sees(pilot, "Ctrl+S saves")
    app.screen.query_one(TextArea).cursor_blink = False


async def _system(app: ChatApp, pilot: Pilot[None]) -> None:
    app.session.set_system(
        "You are a hydrographer. Answer in three sentences at most, with figures in metres."
    )
    await pilot.press("f12")
    await sees(pilot, "Ctrl+S")
    app.screen.query_one(TextArea).cursor_blink = False


async def _help(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("f1")
    await sees(pilot, "Esc closes")


async def _compared(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("f10")
    await sees(pilot, "next prompt")
    app.prompt.insert(QUESTION)
    await pilot.press("enter")
    await sees(pilot, "They differ")


async def _alone(app: ChatApp, pilot: Pilot[None]) -> None:
    await pilot.press("f10")
    await sees(pilot, "llama.cpp")


def _llama() -> FakeEngine:
    """One that is of another opinion from the 40th token on, and tells how probable both candidates were."""
    text = ANSWER[:160] + " high tides, and a coast meets both of them.\n"
    other = [
        replace(e, id=e.id + 1000) if isinstance(e, Token) and e.id >= 40 else e
        for e in reply(text, prompt_ms=360.0, predicted_ms=620.0)
    ]
    return FakeEngine(other, _odds(0.375, 0.441), start=[_LLAMA_READY])


def _odds(ours: float, theirs: float) -> list[Event]:
    top = (TopToken(id=40, logprob=log(ours)), TopToken(id=1040, logprob=log(theirs)))
    return [Token(request_id=0, id=40, text="", top=top)]


_LLAMA_READY = replace(READY, backend="llama.cpp", device_name="b6123-a5d1fb5")
_pair = [reply(ANSWER), _odds(0.418, 0.402)]
_NOT_FOUND = Failed(
    kind="backend", message="llama.cpp's llama-server was not found.", hint="Install llama.cpp."
)

_all = [reply(ANSWER, THOUGHT)]
_chosen = [[*_all[0][:-1], CHOICES, _all[0][-1]]]
_half = [[*reply(ANSWER[: ANSWER.index("moon +")], THOUGHT)[:-1], None]]
_died = [[*reply(ANSWER, THOUGHT)[:140], DIED]]
_filled = [reply(ANSWER, reason="length", prompt_n=READY.context_length)]
_loading = [Loading(done_bytes=done, total_bytes=636_000_000) for done in range(0, 404_000_000, 4_000_000)]

SCENES = {
    "welcome": Scene((80, 24), [], shows="ready"),
    "loading": Scene((60, 20), [], start=(*_loading, None), shows="63%"),
    "reply": Scene((120, 40), _all, QUESTION, shows="such terms", act=_measured),
    "reply-narrow": Scene((60, 20), _all, QUESTION, shows="such terms"),
    "reply-light": Scene((90, 36), _all, QUESTION, shows="such terms", theme="textual-light"),
    "answering": Scene((100, 34), _half, QUESTION, shows="1.00 * sin", act=_queue_and_draft),
    "tiny": Scene((32, 12), [[*reply(ANSWER)[:40], None]], QUESTION, shows="Moon pulls"),
    "died-and-editing": Scene((90, 26), _died, QUESTION, shows="⚠ The engine", act=_edit),
    "full-context": Scene((80, 24), _filled, QUESTION, shows="Ctrl+G offers", act=_full),
    "past-chats": Scene((100, 26), [], act=_past_chats, shows="ready", with_past_chats=True),
    "dashboard": Scene((160, 48), _all, QUESTION, shows="such terms", act=_measured, earlier=True),
    "dashboard-light": Scene(
        (130, 40), _half, QUESTION, shows="1.00 * sin", act=_sampled, theme="textual-light", earlier=True
    ),
    "dashboard-narrow": Scene((70, 40), _all, QUESTION, shows="such terms", act=_dashboard, earlier=True),
    "dashboard-low": Scene((120, 20), _half, QUESTION, shows="1.00 * sin", act=_sampled),
    "whole-throughput": Scene(
        (100, 30), _all, QUESTION, shows="such terms", act=_whole(1, "left", "left"), earlier=True
    ),
    "whole-kernels": Scene((120, 30), _all, QUESTION, shows="such terms", act=_whole(2, "down", "s")),
    "dashboard-experts": Scene(
        (130, 44), _chosen, QUESTION, shows="such terms", act=_measured, start=[WITH_EXPERTS]
    ),
    "whole-experts": Scene(
        (100, 40), _chosen, QUESTION, shows="such terms", act=_whole(3), start=[WITH_EXPERTS]
    ),
    "whole-machine": Scene((80, 24), _all, QUESTION, shows="such terms", act=_whole(3)),
    "kernel": Scene((110, 30), _all, QUESTION, shows="such terms", act=_kernel),
    "presets": Scene((100, 30), [], act=_presets, shows="ready"),
    "edit-preset": Scene((100, 24), [], act=_edit_preset, shows="ready"),
    "system": Scene((60, 20), _all, QUESTION, act=_system, shows="such terms", theme="textual-light"),
    "system-tiny": Scene((20, 8), [], act=_system, shows="Ask"),
    "comparison": Scene((120, 36), _pair, shows="ready", act=_compared, peer=_llama),
    "comparison-narrow": Scene((60, 32), _pair, shows="ready", act=_compared, peer=_llama),
    "comparison-absent": Scene(
        (90, 24), [reply(ANSWER)], QUESTION, shows="ready", act=_alone, peer=lambda: FakeEngine(start=[_NOT_FOUND])
    ),
    "help": Scene((80, 30), [], act=_help, shows="ready"),
}  # fmt: skip
