"""Engines that stay warm between two runs."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest

from app.chat.settings import Settings
from app.cli import stop
from engine.protocol import kept_engines
from engine.protocol.client import LocalEngine, leave
from engine.protocol.events import EngineOptions, Finished, Loading, Ready
from tests import synthetic
from tests.protocol.conftest import running
from tests.protocol.test_client import ask, collect, token_ids
from tests.waiting import LIMIT_S
from tests.waiting import until as soon


@pytest.fixture
def warm(monkeypatch):
    """Makes engines of a model that answers slowly enough to load, to be kept for some seconds."""
    with tempfile.TemporaryDirectory(
        prefix="warm"
    ) as folder:  # a short path: that of a socket has 107 bytes at most
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        model = Path(folder) / "synthetic.gguf"
        model.write_bytes(b"GGUF")

        def make(seconds=60.0, **behaviour):
            plain = synthetic.engine(**{"load_s": 0.0, "prefill_s": 0.0, "rate": 0, **behaviour})
            options = type(plain.options)(model_path=str(model), backend="CPU")
            return LocalEngine(
                options, environment=plain._environment, command=plain._command, keep_warm_s=seconds
            )

        yield make
        kept_engines.stop()


async def gone(pid):
    await soon(lambda: not running(pid), lambda: f"process {pid} lives on")


async def test_the_next_run_finds_the_engine_loaded_and_it_answers(warm, capsys):
    first = warm()
    ready = (await collect(first.start()))[-1]
    await collect(first.generate(ask(max_tokens=3)))
    pid = first.pid
    await leave(first)
    assert running(pid) and first.pid is None

    second = warm()
    assert [type(event) for event in await collect(second.start())] == [Ready]
    events = await collect(second.generate(ask(max_tokens=5)))
    assert token_ids(events) == [0, 1, 2, 3, 4] and isinstance(events[-1], Finished)
    assert second.pid == pid and ready.keep_warm_s == 60
    await leave(second)
    assert stop.run([], Settings()) == 0
    await gone(pid)
    assert stop.run([], Settings()) == 0
    assert capsys.readouterr().out == "ended 1 engine\nno engine is kept warm\n"


@pytest.mark.parametrize("file", ["mmproj", "draft", "lora"])
def test_an_engine_is_not_kept_for_other_files_of_the_same_names(tmp_path, file):
    (tmp_path / "model").touch()
    (tmp_path / file).write_bytes(b"1")
    paths = {"mmproj": "", "draft": "", "lora": ""} | {file: str(tmp_path / file)}
    paths["lora"] = paths["lora"] and f"{paths['lora']}:0.5"
    options = EngineOptions(model_path=str(tmp_path / "model"), **paths)
    before = kept_engines.name_of(options, {})
    assert before and kept_engines.name_of(options, {}) == before
    (tmp_path / file).write_bytes(b"22")
    assert kept_engines.name_of(options, {}) != before


async def test_an_answer_in_progress_is_ended_first(warm):
    first = warm(rate=50)
    stream = first.generate(ask(max_tokens=1000))
    async for event in stream:
        if token_ids([event]):
            break
    pid = first.pid
    await leave(first)
    second = warm(rate=50)
    events = await asyncio.wait_for(collect(second.generate(ask(max_tokens=2))), LIMIT_S)
    assert token_ids(events) == [0, 1] and second.pid == pid
    await second.close()
    await gone(pid)


async def test_it_ends_after_its_time(warm):
    engine = warm(0.3)
    await collect(engine.start())
    pid = engine.pid
    await leave(engine)
    await gone(pid)
    assert not kept_engines.stop()


async def test_another_model_is_not_given_the_engine_and_ends_it(warm):
    engine = warm()
    await collect(engine.start())
    pid = engine.pid
    await leave(engine)
    Path(engine.options.model_path).write_bytes(b"GGUF, another one")
    other = warm()
    events = await collect(other.start())
    assert isinstance(events[0], Loading) and other.pid != pid
    await gone(pid)
    await other.close()


async def test_an_engine_that_died_while_it_was_kept_is_started_anew(warm):
    engine = warm()
    await collect(engine.start())
    pid = engine.pid
    await leave(engine)
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    other = warm()
    events = await collect(other.start())
    assert isinstance(events[0], Loading) and other.pid != pid
    await other.close()


async def test_without_the_option_an_engine_ends_with_its_run(warm):
    engine = warm(0.0)
    await collect(engine.start())
    pid = engine.pid
    await leave(engine)
    await gone(pid)


async def test_an_engine_that_another_user_keeps_is_not_taken(warm, monkeypatch):
    engine = warm()
    await collect(engine.start())
    await leave(engine)
    [path] = kept_engines._paths()
    with kept_engines._connect(path):
        pass
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getuid", lambda: 12345)
        assert kept_engines._connect(path) is None
    assert kept_engines.stop() == 1


def test_a_folder_that_others_can_open_is_not_used(warm, monkeypatch):
    folder = kept_engines._folder()
    assert folder
    folder.chmod(0o755)
    assert kept_engines._folder() is None and kept_engines.take("x") is None
