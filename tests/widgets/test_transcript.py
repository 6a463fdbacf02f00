"""The transcript: what it lays out of long conversations, how it follows its end, what is copied from it."""

from __future__ import annotations

import contextlib

import pytest
from textual.app import App, ComposeResult

from tests.waiting import until
from widgets.chat.transcript import Transcript
from widgets.chat.turn import Turn
from widgets.chat.turn_lines import TurnLines


class TranscriptApp(App[None]):
    def compose(self) -> ComposeResult:
        yield Transcript()


def conversation(count: int) -> list[Turn]:
    return [
        Turn("user", f"prompt {i}")
        if i % 2 == 0
        else Turn("assistant", f"reply {i}\n\nwith *two* paragraphs")
        for i in range(count)
    ]


@contextlib.asynccontextmanager
async def showing(turns: list[Turn], size: tuple[int, int] = (60, 20)):
    app = TranscriptApp()
    app.animation_level = "none"
    async with app.run_test(size=size) as pilot:
        transcript = app.query_one(Transcript)
        transcript.show(turns)
        await pilot.pause()
        yield transcript, pilot


def text(transcript: Transcript) -> str:
    strips = transcript.screen._compositor.render_strips()
    lines = (strip.text.rstrip(" ▁▂▃▄▅▆▇█").removeprefix(" ▌").strip() for strip in strips)
    return "\n".join(lines)


async def test_a_short_conversation_begins_at_the_top():
    async with showing(conversation(2)) as (transcript, pilot):
        lines = text(transcript).split("\n")
        assert "prompt 0" in lines[1]
        transcript.scroll_up(animate=False)
        await pilot.pause()
        for i in range(2, 12):
            transcript.add(Turn("user", f"prompt {i}"))
        await pilot.pause()
        assert "prompt 11" in text(transcript), "it follows its end once it is longer than the screen"


async def test_a_scrollbar_that_appears_shows_where_the_text_is():
    reply = Turn("assistant", "start", finished=False)
    async with showing([Turn("user", "prompt"), reply]) as (transcript, pilot):
        assert not transcript.show_vertical_scrollbar
        reply.content += "\n\nmore" * 20
        transcript.sync(reply)
        await pilot.pause()
        assert transcript.vertical_scrollbar.position == transcript.scroll_y > 0


async def test_a_reply_that_grows_draws_its_last_rows_and_lays_nothing_else_out():
    reply = Turn("assistant", "start", finished=False, streaming=True)
    async with showing([*conversation(12), reply]) as (transcript, pilot):
        refreshed, layouts = list[int](), list[bool]()
        transcript.refresh = lambda *regions, layout=False, **_: (  # type: ignore[method-assign, assignment]
            refreshed.extend(region.y for region in regions),
            layouts.append(layout),
        )
        reply.content += " more"
        transcript.sync(reply)
        assert refreshed == [18, 19], "the text, and the blank row after it"
        reply.content += "\n\nand a paragraph"
        transcript.sync(reply)
        await pilot.pause()
        assert not any(layouts) and transcript.scroll_y == transcript.max_scroll_y > 0


async def test_it_follows_its_end_until_the_user_scrolls_up():
    turns = conversation(12)
    turns.append(reply := Turn("assistant", "start", finished=False))
    async with showing(turns) as (transcript, pilot):
        reply.content += "\n\nmore" * 10
        transcript.sync(reply)
        await pilot.pause()
        assert transcript.scroll_y == transcript.max_scroll_y
        transcript.scroll_relative(y=-8, animate=False)
        await pilot.pause()
        seen, place = text(transcript), transcript.scroll_y
        reply.content += "\n\nand more" * 10
        transcript.sync(reply)
        await pilot.pause()
        assert (text(transcript), transcript.scroll_y) == (seen, place), "what is being read stays"
        transcript.to_end()
        reply.content += "\n\nthe end"
        transcript.sync(reply)
        await pilot.pause()
        assert "the end" in text(transcript)


async def test_scrolling_back_to_the_end_follows_it_again():
    turns = conversation(30)
    async with showing(turns) as (transcript, pilot):
        transcript.scroll_relative(y=-8, animate=False)
        await pilot.pause()
        transcript.scroll_relative(y=20, animate=False)
        await pilot.pause()
        transcript.add(Turn("user", "a new one"))
        await pilot.pause()
        assert "a new one" in text(transcript)


async def test_only_the_turns_near_the_visible_ones_are_laid_out(monkeypatch):
    laid_out = set()
    lay_out = TurnLines.lay_out
    monkeypatch.setattr(TurnLines, "lay_out", lambda self, width: laid_out.add(self) or lay_out(self, width))
    async with showing(conversation(3000)) as (transcript, pilot):
        assert "reply 2999" in text(transcript)
        assert len(laid_out) < 60
        for i in range(3000, 3010):
            transcript.add(Turn("user", f"prompt {i}"))
        await pilot.pause()
        assert "prompt 3009" in text(transcript)
        assert len(laid_out) < 80


async def test_every_turn_can_be_scrolled_to_and_nothing_jumps():
    """Up to the first turn and down to the last, ten lines at a time: each step moves what is visible by ten lines,
    whatever heights turn out to be other than was estimated."""
    turns = conversation(50)
    for turn in turns[3::8]:
        turn.content += "\n\n```python\n" + "x = 1\n" * 9 + "```\n\n" + "- item\n" * 5
    async with showing(turns, size=(60, 20)) as (transcript, pilot):
        for direction, goal in ((-1, "prompt 0"), (1, "reply 49")):
            for _ in range(100):
                before = text(transcript).split("\n")
                transcript.scroll_relative(y=10 * direction, animate=False)
                await pilot.pause()
                after = text(transcript).split("\n")
                if goal in after:
                    break
                older, newer = (after, before) if direction < 0 else (before, after)
                assert older[10:] == newer[:-10]
            else:
                pytest.fail(f"{goal} was never reached")


async def test_first_and_last_turn_at_a_key():
    async with showing(conversation(40)) as (transcript, pilot):
        transcript.to_start()
        await pilot.pause()
        assert "prompt 0" in text(transcript)
        transcript.add(Turn("user", "added far below"))
        await pilot.pause()
        assert "prompt 0" in text(transcript)
        transcript.to_end()
        await pilot.pause()
        assert "added far below" in text(transcript)


@pytest.mark.parametrize("kept", [0, 1, 20, 39])
async def test_cut(kept):
    turns = conversation(40)
    async with showing(turns) as (transcript, pilot):
        transcript.cut(kept)
        transcript.add(Turn("user", "after the cut"))
        await pilot.pause()
        assert "after the cut" in text(transcript)
        assert len(transcript.turns) == kept + 1
        if kept:
            assert turns[kept - 1].content.split("\n")[0] in text(transcript)


async def test_a_narrower_terminal_keeps_the_end_in_sight():
    async with showing(conversation(20), size=(100, 20)) as (transcript, pilot):
        await pilot.resize_terminal(30, 12)
        await until(lambda: "paragraphs" in "\n".join(text(transcript).splitlines()[-3:]))


# --- streaming gives the same as the whole text at once --------------------------------------------------

DOCUMENT = """1. *one*
2. two
   - nested

   ```python
   x = 1
   ```
3. three

```c
int f;
```

| a | b |
|---|---|
| 1 | 2 |
| 3 | 4 |

> quoted

# Heading
1986
"""


@pytest.mark.parametrize("step", [3, 20])
async def test_a_streamed_reply_looks_like_the_whole(step):
    async with showing([Turn("assistant", DOCUMENT)], size=(60, 50)) as (transcript, pilot):
        whole = text(transcript)
        assert len(whole.rstrip("\n").splitlines()) < 40
    turn = Turn("assistant", finished=False, streaming=True)
    async with showing([turn], size=(60, 50)) as (transcript, pilot):
        for start in range(0, len(DOCUMENT), step):
            turn.content += DOCUMENT[start : start + step]
            transcript.sync(turn)
        turn.streaming = False
        transcript.sync(turn)
        await pilot.pause()
        assert text(transcript) == whole


async def test_lines_end_where_the_model_ended_them():
    poem = "Roses are red[^1],\nViolets are blue.\n\n---\n\n> quoted\n> twice\n\n[^1]: a note\n"
    async with showing([Turn("assistant", poem)]) as (transcript, _):
        lines = [line.removeprefix("▌ ") for line in text(transcript).splitlines() if line]
        rule = lines.pop(2)
        assert lines == ["Roses are red¹,", "Violets are blue.", "quoted", "twice", "¹: a note"]
        assert set(rule) == {"─"}, "a rule is seen"


async def test_on_a_slow_line_the_view_follows_in_strides():
    turns = [Turn("assistant", "line\n\n" * 40, streaming=True)]
    async with showing(turns) as (transcript, pilot):
        transcript.stride, tops = 10, set()
        for _ in range(30):
            turns[0].content += "more\n\n"
            transcript.sync(turns[0])
            assert transcript.is_following
            tops.add(round(transcript.scroll_y))
        assert len(tops) <= 13 and all(top % 5 == 0 for top in tops), "at most a quarter of 20 rows is free"
        await pilot.pause()
        shown = "".join(transcript.render_line(y).text for y in range(transcript.size.height))
        assert "more" in shown
