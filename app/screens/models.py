"""The models: search, choose, download, delete. One screen, no pop-ups: questions appear in its last line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.fuzzy import FuzzySearch
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.chat.downloading import Download, describe
from app.chat.model_list import Entry, not_here, on_this_machine, read_entry
from app.screens.page import Frame, Page
from engine.catalog import cache
from engine.catalog.downloads import offer
from engine.catalog.memory_fit import fits, memory_bytes
from engine.catalog.names import HubModel, Source, parse
from engine.errors import OrinError, UsageError
from widgets.ordered_input import OrderedInput
from widgets.text import as_bytes, as_count, one_line

KEYS = "Enter chooses or downloads · Esc back · Delete deletes"
ASK_AFTER_S = 0.4
"""The hub is asked for the size of what stays highlighted this long."""
POLL_S = 0.25


def model_line(entry: Entry, *, is_current: bool, room: str, hits: tuple[int, ...] = ()) -> Content:
    """Two lines of the list: the name with what the file is, and where it is or how large it would be. `room`
    says what is known of its fitting into memory; the characters of the name at `hits` stand out."""
    name = Content.styled(one_line(entry.name), "bold")
    for hit in hits:
        name = name.stylize("$text-accent underline", hit, hit + 1)
    facts = [  # what matters most first: narrow screens cut the rest
        "in use" if is_current else "",
        entry.quantization,
        as_bytes(entry.size_bytes) if entry.size_bytes else "",
        room,
        f"{entry.tokens_per_s:.0f} tok/s" if entry.tokens_per_s else "",
        as_count(entry.parameters) if entry.parameters else "",
        f"{entry.context_length:,} tokens" if entry.context_length else "",
    ]
    place = "not here" if entry.path is None else entry.path.name
    where = entry.problem or (str(entry.path) if entry.path == entry.source else f"{place} · {entry.source}")
    return Content.assemble(
        name,
        ("  " + one_line(" · ".join(fact for fact in facts if fact)), "$foreground 60%"),
        "\n",
        (one_line(where), "$text-warning" if entry.problem else "$foreground 65%"),
    )


class ModelsScreen(Page[Entry | None]):
    """Dismissed with the model to use, whose `path` is set, or None. `download` is the one in progress: it
    goes on when the screen is closed, and may be given to the next one."""

    DEFAULT_CSS = """
    ModelsScreen .line { height: auto; max-height: 3; display: none; padding: 0 1; }
    ModelsScreen .line.-shown { display: block; }
    ModelsScreen #question { color: $text-warning; }
    ModelsScreen #download { color: $text-accent; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("escape", "back", "Close", priority=True),
        Binding("up", "move(-1)", priority=True),
        Binding("down", "move(1)", priority=True),
        Binding("pageup", "move(-8)", priority=True),
        Binding("pagedown", "move(8)", priority=True),
        Binding("delete,ctrl+d", "ask_delete", "Delete", priority=True),
    ]

    def __init__(
        self,
        own: Mapping[str, str],
        current: Path | None,
        *,
        backend: str = "auto",
        download: Download | None = None,
    ) -> None:
        """`own`: the user's names. `current`: the file in use. `backend`: whose memory models are to fit."""
        super().__init__()
        self.own = own
        self.current = current.resolve() if current else None
        self.download = download
        self._backend = backend
        self._memory_bytes = 0
        self._entries: list[Entry] = []
        self._shown: list[Entry] = []
        self._sizes: dict[str, int | str] = {}  # by source: what the hub said of it, or why it did not
        self._query = ""
        self._use_when_here = False
        self._answer: Callable[[bool], None] | None = None  # to the question that is asked
        self._search = FuzzySearch()

    def compose(self) -> ComposeResult:
        with Frame("Models", KEYS):
            yield OrderedInput(
                placeholder="Search · hf.co/user/repository:Q4_K_M · a file", select_on_focus=False
            )
            yield OptionList(Option("Looking what is here …", disabled=True), markup=False)
            yield Static(id="download", classes="line", markup=False)
            yield Static(id="question", classes="line", markup=False)

    def on_mount(self) -> None:
        # Looked up once: what comes late from the hub may find the screen closed.
        self.options, self.field = self.query_one(OptionList), self.query_one(Input)
        self.options.can_focus = False
        self.field.focus()
        self.set_interval(POLL_S, self._watch_download)
        self._look()

    # --- the list ---------------------------------------------------------------------------------------

    @work(group="look", exclusive=True)
    async def _look(self) -> None:
        """Reads what is on this machine, beside the screen: a file's head takes a while."""
        keep = self._chosen
        here = await asyncio.to_thread(on_this_machine, self.own)
        self._entries = [*here, *not_here(here, self.own)]
        self._list(keep.name if keep else "")
        if not self._memory_bytes:
            self._memory_bytes = await asyncio.to_thread(memory_bytes, self._backend)
            self._list(self._chosen.name if self._chosen else "")

    def _list(self, keep: str = "") -> None:
        """Shows the entries that the query finds, the best first; `keep` is the name to highlight."""
        typed, hits_of = self._typed(), {}
        self._shown = self._entries
        if self._query:
            matches = [(self._search.match(self._query, entry.name), entry) for entry in self._entries]
            matches = sorted((match for match in matches if match[0][0]), key=lambda match: -match[0][0])
            hits_of = {id(entry): tuple(hits) for (_, hits), entry in matches}
            self._shown = [*([typed] if typed else []), *(entry for _, entry in matches)]
        options = self.options
        options.clear_options()
        options.add_options([Option(self._line(entry, hits_of.get(id(entry), ()))) for entry in self._shown])
        if self._shown:
            names = [entry.name for entry in self._shown]
            current = next((i for i, entry in enumerate(self._shown) if self._is_current(entry)), 0)
            options.highlighted = names.index(keep) if keep in names else 0 if self._query else current
        else:
            nothing = "No model has this name. hf.co/user/repository names any other."
            options.add_option(Option(nothing, disabled=True))

    def _typed(self) -> Entry | None:
        """What the query names by itself: a file, a repository, an address."""
        try:
            source = parse(self._query, self.own)
        except UsageError:
            return None
        if any(entry.source == source for entry in self._entries):
            return None
        if isinstance(source, Path):
            return Entry(str(source), source, source) if source.is_file() else None
        return Entry(str(source), source, quantization=getattr(source, "quantization", ""))

    def _line(self, entry: Entry, hits: tuple[int, ...] = ()) -> Content:
        size = entry.size_bytes or self._sizes.get(str(entry.source), 0)
        if isinstance(size, str):
            room = size
        else:
            room = (
                ""
                if fits(size, self._memory_bytes)
                else f"more than {as_bytes(self._memory_bytes)} of memory"
            )
            if size and not entry.size_bytes:
                room = f"{as_bytes(size)} to download" + (f" · {room}" if room else "")
        return model_line(entry, is_current=self._is_current(entry), room=room, hits=hits)

    def _is_current(self, entry: Entry) -> bool:
        return entry.path is not None and self.current == entry.path.resolve()

    @property
    def _chosen(self) -> Entry | None:
        index = self.options.highlighted
        return self._shown[index] if index is not None and index < len(self._shown) else None

    @on(Input.Changed)
    def search(self, event: Input.Changed) -> None:
        self._query = event.value.strip()
        self._list()

    def action_move(self, step: int) -> None:
        options = self.options
        if self._shown:
            options.highlighted = max(0, min(len(self._shown) - 1, (options.highlighted or 0) + step))

    @on(OptionList.OptionHighlighted)
    def ask_size(self, event: OptionList.OptionHighlighted) -> None:
        entry = self._chosen
        if entry and entry.path is None and isinstance(entry.source, HubModel):
            self._ask_hub(entry)

    @work(group="size", exclusive=True)
    async def _ask_hub(self, entry: Entry) -> None:
        """What the hub states of the size of a model that is not here."""
        assert isinstance(entry.source, HubModel)
        key = str(entry.source)
        if key in self._sizes:
            return
        await asyncio.sleep(ASK_AFTER_S)
        try:
            self._sizes[key] = (await asyncio.to_thread(offer, entry.source)).size_bytes
        except OrinError as error:
            self._sizes[key] = f"size not known: {error.message}"
        if entry in self._shown:
            index = self._shown.index(entry)
            self.options.replace_option_prompt_at_index(index, self._line(entry))

    # --- choosing and downloading -----------------------------------------------------------------------

    @on(OptionList.OptionSelected)
    def choose_clicked(self, event: OptionList.OptionSelected) -> None:
        if event.option_index < len(self._shown):
            self._choose(self._shown[event.option_index])

    @on(Input.Submitted)
    def choose_highlighted(self, event: Input.Submitted) -> None:
        if chosen := self._chosen:
            self._choose(chosen)

    def _choose(self, entry: Entry) -> None:
        size = entry.size_bytes or self._sizes.get(str(entry.source), 0)
        if entry.problem:
            self._say(entry.problem)
        elif isinstance(size, int) and not fits(size, self._memory_bytes):
            memory = as_bytes(self._memory_bytes)
            self._ask(
                f"{entry.name} has {as_bytes(size)}, the memory {memory}. Go on? y goes on, any other key does not",
                lambda yes: self._use_or_download(entry) if yes else None,
            )
        else:
            self._use_or_download(entry)

    def _use_or_download(self, entry: Entry) -> None:
        if entry.path is not None:
            self.dismiss(entry)
        elif self.download is not None and not self.download.is_over:
            self._say(f"One at a time: Delete at {self.download.name} stops that download")
        elif not isinstance(entry.source, Path):
            self.download = Download(entry.name, entry.source)
            self._use_when_here = True
            self._watch_download()

    def _watch_download(self) -> None:
        if (download := self.download) is None:
            return
        line = self.query_one("#download", Static)
        line.set_class(not download.is_over, "-shown")
        line.update(Content(f"{describe(download.progress)} · Delete stops it, Esc lets it go on"))
        if not download.is_over:
            return
        self.download = None
        if download.error:
            self._say(str(download.error))
        elif download.path is None:
            self._say(f"Stopped: what came of {download.name} is kept, and Enter goes on with it")
        elif self._use_when_here:
            self._use(download.source, download.path)
            return
        self._look()

    @work(group="use")
    async def _use(self, source: Source, path: Path) -> None:
        chosen = await asyncio.to_thread(read_entry, source, path, self.own)
        if chosen.problem:
            self._say(chosen.problem)
            self._look()
        else:
            self.dismiss(chosen)

    def action_back(self) -> None:
        self.dismiss(None)

    # --- delete -----------------------------------------------------------------------------------------

    def action_ask_delete(self) -> None:
        entry = self._chosen
        if entry and self.download is not None and self.download.source == entry.source:
            self.download.stop()
        elif entry is None or entry.path is None or isinstance(entry.source, Path):
            self._say("Only what was downloaded by a name can be deleted here" if entry else "")
        elif self._is_current(entry):
            self._say(f"{entry.name} is in use")
        else:
            question = (
                f"Delete {entry.name} ({as_bytes(entry.size_bytes)})? y deletes, any other key keeps it"
            )
            self._ask(question, lambda yes: self._delete(entry) if yes else None)

    def _delete(self, entry: Entry) -> None:
        try:
            for model in cache.installed():
                if model.path == entry.path:
                    freed = cache.remove(model)
                    self._say(f"Deleted {entry.name}: {as_bytes(freed)} are free again")
        except OSError as error:
            self._say(f"{entry.name} cannot be deleted: {error.strerror}")
        self._look()

    # --- questions --------------------------------------------------------------------------------------

    def _ask(self, question: str, answer: Callable[[bool], None]) -> None:
        """Asks in the last line; the next key is the answer."""
        self._answer = answer
        self.field.disabled = True  # the answer is not a search
        self._say(question)

    def on_key(self, event: events.Key) -> None:
        if self._answer is not None:
            event.stop()
            answer, self._answer = self._answer, None
            self.field.disabled = False
            self.field.focus()
            self._say("")
            answer(event.key == "y")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self._answer is None  # while something is asked, every key is an answer

    def _say(self, text: str) -> None:
        line = self.query_one("#question", Static)
        line.update(Content(one_line(text)))
        line.set_class(bool(text), "-shown")
