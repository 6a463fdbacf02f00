"""The page of models: search, choose, download, delete."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from textual import on, work
from textual.content import Content
from textual.fuzzy import FuzzySearch
from textual.widgets import Static

from app.chat.download import Download, progress_text
from app.chat.model_list import Entry, delete_downloaded, not_here, on_this_machine, read_entry, source_of
from app.screens.pages.list_page import ListPage, show_line
from engine.catalog import cache
from engine.catalog.downloads import find_on_hub
from engine.catalog.memory_fit import fits, memory_bytes
from engine.catalog.names import HubModel, Source, hub_hint, parse, without_separators
from engine.errors import ModelFileError, OrinError
from widgets.entry_list import EntryList
from widgets.page import Frame
from widgets.text import as_bytes, one_line

SIZE_DELAY_S = 0.4
"""How long an entry must stay highlighted before the hub is asked for its size."""
POLL_S = 0.25


def usable_model(name: str, names: Mapping[str, str], backend: str) -> Entry | None:
    """The model that `name` stands for, if it is on this machine, can be run and fits into the memory of `backend`."""
    with contextlib.suppress(ModelFileError, OSError):
        source, path = source_of(name, names)
        if path is not None:
            model = read_entry(source, path, names)
            if not model.problem and fits(memory_bytes(backend), model.size_bytes, model.need_bytes):
                return model
    return None


class ModelsScreen(ListPage[Entry, Entry | None]):
    """Dismissed with the model to use, whose `path` is set, or None. `download` is the one in progress. It goes on
    when the page is closed, and can be given to the next page."""

    FRAME_TITLE = "Models"
    KEYS = (
        "Enter chooses or downloads · Esc back · Delete deletes",
        "Enter chooses · Del deletes",
        "Delete deletes",
    )
    PLACEHOLDER = "Search · hf.co/user/repository:Q4_K_M · a file"
    EMPTY = "Looking for models …"
    NOTHING_FOUND = "No model has this name. hf.co/user/repository names any other."
    DEFAULT_CSS = "ModelsScreen #download { color: $text-accent; }"

    def __init__(
        self,
        names: Mapping[str, str],
        current: Path | None,
        *,
        backend: str = "auto",
        download: Download | None = None,
        search: str = "",
    ) -> None:
        """`names` are the user's own names of models. `current` is the file in use. The models are compared with the
        memory of `backend`. The page begins with a `search`."""
        super().__init__(search)
        self.names = names
        self.current = current.resolve() if current else None
        self.download = download
        self.models: list[Entry] = []  # empty until they have been read
        self.memory_bytes = 0  # 0: not known yet
        self._backend = backend
        self._hub_sizes: dict[str, int | str] = {}  # by source: bytes, or why they are not known
        self._hits: dict[str, tuple[int, ...]] = {}  # by name: the characters that the search matches
        self._fuzzy = FuzzySearch()
        self._use_when_downloaded = False
        self._download_line = Static(id="download", classes="line", markup=False)

    def on_mount(self) -> None:
        self.query_one(Frame).mount(self._download_line, before=self.question)
        self.set_interval(POLL_S, self._watch_download)
        self._read_models()

    # --- the list ---------------------------------------------------------------------------------------

    @work(group="read", exclusive=True)
    async def _read_models(self) -> None:
        """Lists the models of this machine. Threads read, since the heads of many files take a while."""
        present = await asyncio.to_thread(on_this_machine, self.names)
        self.models = [*present, *not_here(present, self.names)]
        self.show_entries()
        if not self.memory_bytes:
            self.memory_bytes = await asyncio.to_thread(memory_bytes, self._backend)
            self.show_entries()

    def find(self, text: str) -> list[Entry]:
        """The models with a matching name, the best match first, below the source that the text itself names."""
        letters = without_separators(text)  # "qwen3 4b" finds qwen3:4b
        if not letters:
            self._hits = {}
            return self.models
        matches = [(*self._fuzzy.match(letters, model.name), model) for model in self.models]
        matches = [match for match in matches if match[0]]
        matches.sort(key=lambda match: (without_separators(match[2].name) != letters, -match[0]))
        self._hits = {model.name: tuple(hits) for _, hits, model in matches}
        named = self._named_by(text)
        return [*([named] if named else []), *(model for _, _, model in matches)]

    def _named_by(self, text: str) -> Entry | None:
        """The file, repository or address that `text` is, if it is not among the models."""
        try:
            source = parse(text, self.names)
        except ModelFileError:
            return None
        if any(model.source == source for model in self.models):
            return None
        if isinstance(source, Path):
            return Entry(str(source), source, source) if source.is_file() else None
        return Entry(str(source), source, quantization=getattr(source, "quantization", ""))

    def nothing_found(self, text: str) -> str:
        with contextlib.suppress(ModelFileError):
            if isinstance(path := parse(text, self.names), Path):
                shown = one_line(str(path))
                if path.is_dir():
                    return f"{shown} is a folder."
                return hub_hint(text) or f"There is no file {shown}."  # a row of the list: one sentence
        return super().nothing_found(text)

    def line(self, model: Entry) -> Content:
        """The name with what the file is; below, where it is, or would come from."""
        name = Content.styled(one_line(model.name), "bold")
        for hit in self._hits.get(model.name, ()):
            name = name.stylize("$text-accent underline", hit, hit + 1)
        facts = [  # the most important first: narrow screens cut the end
            "in use" if self.is_in_use(model) else "",
            model.quantization,
            as_bytes(model.size_bytes) if model.size_bytes else "",
            *self._size_facts(model),
            "sees" if model.encoder else "",
            f"{model.tokens_per_s:.0f} tok/s" if model.tokens_per_s else "",
            model.parameters_text,
            f"{model.context_length:,} tokens" if model.context_length else "",
        ]
        file_name = "not here" if model.path is None else model.path.name
        place = str(model.path) if model.path == model.source else f"{file_name} · {model.source}"
        return Content.assemble(
            name,
            ("  " + one_line(" · ".join(fact for fact in facts if fact)), "$foreground 60%"),
            "\n",
            (one_line(model.problem or place), "$text-warning" if model.problem else "$foreground 65%"),
        )

    def _size_facts(self, model: Entry) -> list[str]:
        size = self._size_of(model)
        if isinstance(size, str):
            return [size]
        to_download = f"{as_bytes(size)} to download" if size and not model.size_bytes else ""
        return [
            to_download,
            "" if self._fits(model, size) else f"more than {as_bytes(self.memory_bytes)} of memory",
        ]

    def _size_of(self, model: Entry) -> int | str:
        """Bytes (0: not known yet), or why they are not known."""
        return model.size_bytes or self._hub_sizes.get(str(model.source), 0)

    def _fits(self, model: Entry, size_bytes: int) -> bool:
        return fits(self.memory_bytes, size_bytes, model.need_bytes)

    def key(self, model: Entry) -> str:
        return model.name

    def is_in_use(self, model: Entry) -> bool:
        return model.path is not None and self.current == model.path.resolve()

    @on(EntryList.Highlighted)
    def _highlight_changed(self) -> None:
        model = self.highlighted
        if model and model.path is None and isinstance(model.source, HubModel):
            self._ask_size(model, model.source)

    @work(group="size", exclusive=True)
    async def _ask_size(self, model: Entry, source: HubModel) -> None:
        """Asks the hub for the size of a model that is not on this machine, once."""
        if (name := str(source)) in self._hub_sizes:
            return
        await asyncio.sleep(SIZE_DELAY_S)
        try:
            self._hub_sizes[name] = (await asyncio.to_thread(find_on_hub, source)).size_bytes
        except OrinError as error:
            self._hub_sizes[name] = f"size not known: {error.message}"
        self.list.refresh()

    # --- choosing and downloading -----------------------------------------------------------------------

    def choose(self, model: Entry) -> None:
        size = self._size_of(model)
        if model.problem:
            self.say(model.problem)
        elif isinstance(size, int) and not self._fits(model, size):
            need = (
                f"needs {as_bytes(model.need_bytes)}"
                if model.need_bytes
                else f"is a file of {as_bytes(size)}"
            )
            question = f"{model.name} {need}, the memory has {as_bytes(self.memory_bytes)}."
            self.ask(f"{question} Go on? y goes on, any other key does not", lambda: self._use(model))
        else:
            self._use(model)

    def _use(self, model: Entry) -> None:
        if model.path is not None:
            self.dismiss(model)
        elif self.download is not None and not self.download.is_over:
            self.say(f"One at a time: Delete at {self.download.name} stops that download")
        elif not isinstance(model.source, Path):
            self.say("")  # of the one before
            self.download = Download(model.name, model.source)
            self._use_when_downloaded = True
            self._watch_download()

    def _watch_download(self) -> None:
        if (download := self.download) is None:
            return
        progress = f"{progress_text(download.progress)} · Delete stops it, Esc lets it go on"
        show_line(self._download_line, "" if download.is_over else progress)
        if not download.is_over:
            return
        self.download = None
        if download.error:
            self.say(str(download.error))
        elif download.path is None:
            kept = f"the downloaded part of {download.name} is kept, and Enter goes on with it"
            self.say(f"Stopped: {kept}" if download.progress.done_bytes else "Stopped")
        elif self._use_when_downloaded:
            self._use_file(download.source, download.path)
            return
        self._read_models()

    @work(group="use")
    async def _use_file(self, source: Source, path: Path) -> None:
        model = await asyncio.to_thread(read_entry, source, path, self.names)
        if model.problem:
            self.say(model.problem)
            self._read_models()
        else:
            self.dismiss(model)

    # --- deleting ---------------------------------------------------------------------------------------

    def delete(self, model: Entry) -> None:
        if self.download is not None and self.download.source == model.source:
            self.download.stop()
        elif model.path is None or isinstance(model.source, Path):
            self.say("Only a model that was downloaded by its name can be deleted here")
        elif self.is_in_use(model):
            self.say(f"{model.name} is in use")
        else:
            size = as_bytes(model.size_bytes)
            question = f"Delete {model.name} ({size})? y deletes, any other key keeps it"
            self.ask(question, lambda: self._delete(model))

    def _delete(self, model: Entry) -> None:
        try:
            for file in cache.installed():
                if file.path == model.path:
                    self.say(f"Deleted {model.name}: {as_bytes(delete_downloaded(file))} are free again")
        except OSError as error:
            self.say(f"{model.name} cannot be deleted: {error.strerror}")
        self._read_models()
