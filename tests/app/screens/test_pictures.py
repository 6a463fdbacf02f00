"""Pictures in a chat, as a user sees them."""

from __future__ import annotations

from math import inf

import pytest

from engine.protocol.events import Seeing
from tests.app.driver import chat
from tests.app.fake_engine import READY, SEEING, STARTED, FakeEngine, reply
from tests.pictures import plain_picture
from tests.thorough import thorough
from widgets.chat.transcript import THIN_SPELLS


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sea.png").write_bytes(plain_picture("navy"))
    return tmp_path


def seeing(done, **more):
    return Seeing(request_id=0, index=0, pictures=1, tokens=256, done=done, total=27, **more)


async def test_a_picture_goes_along_and_is_shown_in_small(history, folder, monkeypatch):
    looks = [seeing(18, compiles=True), None, seeing(9), None, seeing(27)]
    engine = FakeEngine([*looks, *reply("Blue.")], reply("Still."), start=[SEEING])
    async with chat(engine, history) as user:
        await user.idle()
        user.app.prompt.insert(user.app.prompt.paste(f"{folder}/sea.png"))
        await user.sees("▪ sea.png 60×40")
        await user.press(*"what?", "enter")
        await user.sees("preparing kernels for picture 1 of 1 · 67%")
        engine.release()
        await user.sees("looking at picture 1 of 1 · 33%")
        assert "▀" * 48 in user.screen()
        engine.release()
        await user.sees("Blue.")
        await user.sees("▪ sea.png 60×40 256 tokens")
        await user.idle()
        for _ in range(THIN_SPELLS):
            await user.until(lambda: "▀" in user.screen())
            monkeypatch.setattr(user.app, "_thin_until", inf)
            await user.until(lambda: "▀" not in user.screen())
            monkeypatch.setattr(user.app, "_thin_until", 0.0)
        await user.until(lambda: not user.app.is_line_thin)
        assert "▀" not in user.screen()
        (folder / "sea.png").unlink()
        await user.press("f2", "end", "!", "enter")
        await user.sees("Still.")
        first, second = ([m.pictures for m in request.prompt.messages] for request in engine.requests)
        assert first == second and first[0][0].data == plain_picture("navy")


async def test_a_model_that_does_not_see_leaves_the_prompt_where_it_is(history):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        user.app.prompt.insert("Look at @sea.png")
        await user.sees("sea.png 60×40: this model sees no pictures")
        await user.press("enter")
        await user.sees("Qwen3 0.6B sees no pictures. A model does that has its encoder beside it")
        assert user.app.prompt.text == "Look at @sea.png" and not user.engine.requests


@thorough
async def test_a_picture_attached_while_the_model_loads_is_marked_when_it_is_there(history):
    engine = FakeEngine(start=[*STARTED[:2], None, READY])
    async with chat(engine, history) as user:
        user.app.prompt.insert("Look at @sea.png")
        await user.sees("sea.png 60×40")
        assert "sees no pictures" not in user.screen()
        engine.release()
        await user.sees("sea.png 60×40: this model sees no pictures")


async def test_a_copied_picture_is_pasted_and_has_a_name(history, folder, monkeypatch):
    (folder / "copied").write_bytes(plain_picture("red"))
    command = folder / "wl-paste"
    command.write_text(f"#!/bin/sh\ncat {folder}/copied\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    async with chat(FakeEngine(reply("Red."), start=[SEEING]), history) as user:
        await user.idle()
        await user.press("ctrl+v")
        await user.until(lambda: user.app.prompt.text == "@pasted-1.png ")
        await user.press("?", "enter")
        await user.sees("Red.")
        [message] = user.engine.requests[0].prompt.messages
        assert message.pictures[0].data == plain_picture("red")
        (folder / "copied").write_bytes(b"no picture")
        await user.press("ctrl+v")
        await user.sees("No picture was copied on this machine")
        monkeypatch.delenv("WAYLAND_DISPLAY")
        monkeypatch.delenv("DISPLAY", raising=False)
        await user.press("ctrl+v")
        await user.sees("No desktop runs on this machine, and terminals pass on no pictures.")
        user.app.copy_to_clipboard("a text")
        await user.press("ctrl+v")
        await user.until(lambda: user.app.prompt.text == "a text")
