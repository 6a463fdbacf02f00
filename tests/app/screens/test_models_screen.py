"""The screen of models, with a hub on loopback."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
from textual.app import App
from textual.widgets import Input, Static

from app.chat import speed_history
from app.screens.pages import models as screen_module
from app.screens.pages.models import ModelsScreen
from engine.catalog import cache
from engine.catalog.downloads import download
from engine.catalog.names import KnownModel, parse
from engine.formats.gguf import GGUF
from engine.loading import packed_weights_cache
from tests.catalog.fixtures import fake_hub
from tests.generated_model import write
from tests.waiting import until
from widgets.entry_list import EntryList
from widgets.text import as_bytes

__all__ = ["fake_hub"]

NAME = "hf.co/user/model-GGUF:Q8_0"


@pytest.fixture
def hub(fake_hub, tmp_path, monkeypatch):
    """A hub with two models that can run; a short name is known of each."""
    fake_hub.files = {
        "model-Q8_0.gguf": write(tmp_path / "q8.gguf", architecture="qwen3").read_bytes(),
        "model-F16.gguf": write(tmp_path / "f16.gguf", quant="F16", context=512).read_bytes(),
    }
    known = [KnownModel(f"noise:{q.lower()}", fake_hub.repository, q, "qwen3") for q in ("Q8_0", "F16")]
    for module in ("engine.catalog.names", "app.chat.model_list"):
        monkeypatch.setattr(f"{module}.known_models", lambda: known)
    monkeypatch.setattr(screen_module, "SIZE_DELAY_S", 0.0)
    monkeypatch.setattr(screen_module, "POLL_S", 0.02)
    monkeypatch.setattr(screen_module, "memory_bytes", lambda backend: 8_000_000_000)
    return fake_hub


class User:
    def __init__(self, app, pilot, screen, results):
        self.app, self.pilot, self.screen, self.results = app, pilot, screen, results

    async def until(self, holds):
        await until(holds, self.text)

    async def press(self, *keys):
        await self.pilot.press(*keys)

    async def sees(self, text):
        await self.until(lambda: text in self.text())

    def rows(self):
        return self.screen.query_one(EntryList).texts

    def text(self):
        lines = [str(line.content) for line in self.screen.query(Static) if line.has_class("-shown")]
        return "\n".join([*self.rows(), *lines])

    async def type(self, text):
        self.screen.query_one(Input).value = text
        await self.pilot.pause()

    @property
    def chosen(self):
        return self.rows()[self.screen.query_one(EntryList).highlighted].split()[0]


@asynccontextmanager
async def opened(own=None, current=None, **options):
    app = App()
    async with app.run_test(size=(120, 40)) as pilot:
        results = []
        screen = ModelsScreen(own or {}, current, **options)
        app.push_screen(screen, lambda chosen: results.append(chosen and chosen.path))
        user = User(app, pilot, screen, results)
        await user.until(lambda: screen.models and screen.memory_bytes)
        yield user


async def test_what_is_here_and_what_is_known(hub, home):
    path = download(parse("noise:q8_0"))
    speed_history.record_use(path, "CPU", 100, 42.0)
    mine = write(home / "mine.gguf", context=256)
    async with opened({"work": str(mine)}, current=path) as user:
        first, work, other = user.rows()
        size = as_bytes(len(hub.files["model-Q8_0.gguf"]))
        assert first.startswith(f"noise:q8_0  in use · Q8_0 · {size} · ")
        assert " · 42 tok/s · " in first and f"model-Q8_0.gguf · {NAME}" in first
        assert work.startswith("work  Q8_0 · ") and str(mine) in work
        assert other.startswith("noise:f16  F16") and "not here · hf.co/user/model-GGUF:F16" in other
        assert user.chosen == "noise:q8_0"


async def test_the_size_of_what_is_not_here_is_asked_for(hub):
    async with opened() as user:
        await user.sees(f"{as_bytes(len(hub.files['model-Q8_0.gguf']))} to download")
        assert "F16" not in next(row for row in user.rows() if "to download" in row)
        await user.press("down")
        await user.sees(f"{as_bytes(len(hub.files['model-F16.gguf']))} to download")
        before = len(hub.requests)
        await user.press("up", "down", "up")
        await user.pilot.pause(0.05)
        assert len(hub.requests) == before


async def test_without_a_network_sizes_are_not_known(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    async with opened() as user:
        await user.sees("size not known: The hub (http://127.0.0.1:9) cannot be reached")


async def test_search_is_fuzzy_and_the_best_comes_first(hub):
    async with opened() as user:
        for text in ("nf16", "Noise F16", "noise-f16"):
            await user.type(text)
            assert user.chosen == "noise:f16" and len(user.rows()) == 1
        await user.type("nothing at all")
        assert "No model has this name" in user.text()
        await user.press("enter", "down", "delete")
        assert user.results == []
        await user.type("")
        assert len(user.rows()) == 2


async def test_choosing_what_is_here(hub):
    path = download(parse("noise:f16"))
    async with opened() as user:
        await user.type("f16")
        await user.press("enter")
        await user.until(lambda: user.results)
    assert user.results == [path]


async def test_a_download_from_there_shows_progress_and_is_chosen(hub):
    hub.files["model-Q8_0.gguf"] = hub.files["model-Q8_0.gguf"] * 3
    hub.pause_s = 0.01
    async with opened() as user:
        await user.press("enter")
        await user.sees("kB of ")
        await user.sees("Delete stops it")
        assert user.results == []
        hub.pause_s = 0
        await user.until(lambda: user.results)
    assert user.results == [cache.find(parse("noise:q8_0"))]


async def test_a_download_can_be_stopped_and_goes_on(hub):
    hub.files["model-Q8_0.gguf"] *= 10
    hub.pause_s = 0.02
    async with opened() as user:
        await user.press("enter")
        await user.until(lambda: user.screen.download and user.screen.download.progress.done_bytes > 30_000)
        await user.press("down", "enter")
        await user.sees("One at a time")
        await user.press("up", "delete")
        await user.sees("Stopped: the downloaded part of noise:q8_0 is kept")
        hub.pause_s = 0
        hub.requests.clear()
        await user.press("enter")
        assert "Stopped" not in user.text()
        await user.until(lambda: user.results)
        assert any("Range" in headers for *_, headers in hub.requests)


async def test_a_download_goes_on_when_the_screen_is_closed(hub):
    hub.files["model-Q8_0.gguf"] *= 3
    hub.pause_s = 0.01
    async with opened() as user:
        await user.press("enter")
        await user.until(lambda: user.screen.download and user.screen.download.progress.done_bytes)
        going = user.screen.download
        await user.press("escape")
        await user.until(lambda: user.results == [None])
        hub.pause_s = 0
        await user.until(lambda: going.is_over)
        assert going.path == cache.find(parse("noise:q8_0"))


async def test_a_download_that_fails_says_why(hub):
    async with opened() as user:
        hub.answers.append(404)
        await user.press("enter")
        await user.sees("does not exist, or it is private")
        assert user.results == []


async def test_what_is_larger_than_the_memory_asks_first(hub, monkeypatch):
    monkeypatch.setattr(screen_module, "memory_bytes", lambda backend: 1000)
    async with opened() as user:
        await user.sees("more than 1.00 kB of memory")
        await user.press("enter")
        await user.sees("the memory has 1.00 kB. Go on?")
        await user.press("n")
        assert user.screen.download is None and "Go on?" not in user.text()
        await user.press("enter", "y")
        await user.until(lambda: user.results)
    assert cache.find(parse("noise:q8_0"))


async def test_repositories_addresses_and_files_can_be_typed(hub, home):
    mine = write(home / "mine.gguf")
    async with opened() as user:
        await user.type("hf.co/user/model-GGUF")
        assert user.chosen == "hf.co/user/model-GGUF"
        await user.type("https://example.org/x.gguf")
        assert user.chosen == "https://example.org/x.gguf"
        await user.type("hf.co/user")
        assert "No model has this name" in user.text()
        await user.type(str(home / "typo.gguf"))
        assert f"There is no file {home / 'typo.gguf'}." in user.text()
        await user.type("someone/some-GGUF")
        assert "A model of the Hugging Face hub is hf.co/someone/some-GGUF." in user.text()
        await user.type(f"{home}/")
        assert f"{home} is a folder." in user.text()
        await user.type(str(mine))
        await user.press("enter")
        await user.until(lambda: user.results)
    assert user.results == [mine]


async def test_deleting_asks_and_spares_what_is_in_use(hub, home):
    current = download(parse("noise:f16"))
    path = download(parse("noise:q8_0"))
    mine = write(home / "mine.gguf")
    with GGUF(path) as file:
        packed_weights_cache.write(file, 8, {"output": np.zeros(5_000_000, np.uint8)})
    async with opened({"work": str(mine)}, current=current) as user:
        await user.press("delete")
        await user.sees("noise:f16 is in use")
        await user.type("q8")
        await user.press("delete")
        await user.sees("Delete noise:q8_0")
        await user.press("n")
        assert path.exists()
        await user.press("delete", "y")
        await user.sees("5.14 MB are free again")
        assert not path.exists() and not list(packed_weights_cache.folder().iterdir())
        await user.type("work")
        await user.press("delete")
        await user.sees("Only a model that was downloaded by its name")
        assert mine.exists()


async def test_a_file_that_cannot_be_used_says_why(hub, home):
    broken = home / "broken.gguf"
    broken.write_bytes(b"GGUF")
    async with opened({"broken": str(broken)}) as user:
        assert "broken.gguf is truncated" in user.text()
        await user.type("broken")
        await user.press("enter")
        await user.until(lambda: user.text().count("is truncated") == 2)
        assert user.results == []


async def test_names_are_data(hub, home):
    evil = write(home / "[bold]evil[/bold]\x1b[31m.gguf")
    speed_history.record_use(evil)
    async with opened() as user:
        await user.sees("[bold]evil[/bold]")
        assert "\x1b" not in user.text()
        await user.type("[red]\x1b(")
        await user.type("evil")
        await user.press("enter")
        await user.until(lambda: user.results)
    assert user.results == [evil]
