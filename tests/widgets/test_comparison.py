"""The comparison pane: texts, where they part, figures, ratios; whatever the engines say."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from textual.app import App, ComposeResult

from tests.thorough import thorough
from widgets.dashboard.comparison_data import ComparisonData, Difference, EngineAnswer
from widgets.dashboard.comparison_pane import AnswerText, ComparisonPane

LEFT = EngineAnswer(
    name="orin-chat",
    about="CUDA",
    state="done",
    text="The water falls, a little at a time.",
    same=36,
    prompt_tokens=40,
    tokens=9,
    first_token_s=0.021,
    prefill=1905.0,
    decode=57.44,
    gbps=42.4,
    share=0.53,
    memory_bytes=1_210_000_000,
)
RIGHT = replace(
    LEFT,
    name="llama.cpp",
    about="b1-0c1e570",
    first_token_s=0.042,
    prefill=952.5,
    decode=60.0,
    gbps=44.3,
    share=None,
    memory_bytes=None,
)
DONE = ComparisonData(LEFT, RIGHT, complete=True, same=9)


class PaneApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[object] = []
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        yield ComparisonPane()

    def on_comparison_pane_again(self, message: ComparisonPane.Again) -> None:
        self.messages.append(message)

    def on_comparison_pane_mode_changed(self, message: ComparisonPane.ModeChanged) -> None:
        self.messages.append(message)

    def on_comparison_pane_closed(self, message: ComparisonPane.Closed) -> None:
        self.messages.append(message)


@contextlib.asynccontextmanager
async def showing(view: ComparisonData, size: tuple[int, int] = (100, 24)):
    app = PaneApp()
    async with app.run_test(size=size) as pilot:
        pane = app.query_one(ComparisonPane)
        pane.data = view
        await pilot.pause()
        yield pane, pilot


def lines(pane: ComparisonPane) -> list[str]:
    return [strip.text.rstrip() for strip in pane.screen._compositor.render_strips()]


def line_with(pane: ComparisonPane, words: str) -> str:
    [line] = [line for line in lines(pane) if words in line]
    return " ".join(line.split())


async def test_two_texts_and_their_figures():
    async with showing(DONE) as (pane, _):
        assert "orin-chat · done · CUDA" in lines(pane)[0]
        assert "llama.cpp · done · b1-0c1e570" in lines(pane)[0]
        assert lines(pane)[1].count("The water falls, a little at a time.") == 2
        assert line_with(pane, "first token") == "first token 21 ms ◀ 2.00× 42 ms"
        assert line_with(pane, "prefill") == "prefill 1,905 tok/s ◀ 2.00× 952.5 tok/s"
        assert line_with(pane, "decode") == "decode 57.4 tok/s 1.04× ▶ 60.0 tok/s"
        assert line_with(pane, "GB/s") == "modelled GB/s 42.4 (53% of roofline) 44.3"
        assert line_with(pane, "memory") == "memory 1.21 GB –"
        assert line_with(pane, "same") == "The same 9 tokens."
        assert line_with(pane, "greedy").startswith("in turn · greedy · ")


async def test_both_sides_say_the_same_of_their_figures():
    view = replace(DONE, left=replace(LEFT, decode=1204.0), right=replace(RIGHT, share=0.4))
    async with showing(view, (60, 20)) as (pane, _):
        assert line_with(pane, "GB/s") == "modelled GB/s 42.4 44.3"
    async with showing(view, (38, 20)) as (pane, _):
        assert line_with(pane, "21 ms").split()[0] == "first"
        assert line_with(pane, "952").split() == ["prefill", "1,905", "◀", "2.00×", "952.5"]
    async with showing(view, (28, 12)) as (pane, _):
        assert line_with(pane, "1,204").replace("◀", " ◀ ").split() == ["1,204", "◀", "20.07×", "60.0"]


async def test_the_figures_of_a_tie():
    async with showing(replace(DONE, right=replace(RIGHT, decode=57.45))) as (pane, _):
        assert line_with(pane, "decode") == "decode 57.4 tok/s alike 57.5 tok/s"


@pytest.mark.parametrize("width", [120, 60])
async def test_figures_taken_beside_other_programs_have_no_ratios(width):
    view = replace(DONE, remark="other programs take 43 % of the CPU")
    async with showing(view, (width, 30)) as (pane, _):
        assert line_with(pane, "⚠").startswith("⚠ other programs take 43 % of the CPU: no ratios · in tu")
        assert "×" not in line_with(pane, "decode") and "tok/s" in line_with(pane, "decode")


async def test_nothing_is_known_at_first():
    async with showing(ComparisonData(EngineAnswer("orin-chat"), EngineAnswer("llama.cpp"))) as (pane, pilot):
        assert line_with(pane, "decode") == "decode – –"
        assert line_with(pane, "next") == "The next prompt is answered by both."
        pane.data = ComparisonData(EngineAnswer("orin-chat"), EngineAnswer("llama.cpp", problem="It died."))
        await pilot.pause()
        assert line_with(pane, "next") == (
            "The next prompt tries llama.cpp again; without it, orin-chat answers alone."
        )


async def test_texts_are_not_compared_before_both_have_begun():
    begun = ComparisonData(
        replace(LEFT, same=0), EngineAnswer("llama.cpp", state="its turn comes"), asked="Why?"
    )
    async with showing(begun) as (pane, pilot):
        assert "same" not in "\n".join(lines(pane))
        pane.data = replace(begun, right=RIGHT, same=2)
        await pilot.pause()
        assert line_with(pane, "same") == "The same so far: 2 tokens."


async def test_where_the_texts_part():
    view = replace(
        DONE,
        right=replace(RIGHT, text="The water rises.", same=10),
        left=replace(LEFT, same=10),
        same=2,
        difference=Difference(3, " falls", " rises", (0.312, 0.309), (0.308, 0.311)),
    )
    async with showing(view, (160, 24)) as (pane, _):
        assert line_with(pane, "differ") == (
            "They differ from token 3 on: “␣falls” or “␣rises” · to orin-chat 31.2% and 30.9% "
            "· to llama.cpp 30.8% and 31.1%"
        )
        [text] = [text for text in pane.query(".text") if "rises" in str(text.render())]
        [span] = text.render().spans
        assert (span.start, span.end, str(span.style)) == (10, 16, "bold underline $text-accent")


async def test_candidates_without_a_text_or_with_white_space():
    view = replace(DONE, difference=Difference(1, "", "\n\t", (0.5, None)))
    async with showing(view) as (pane, _):
        assert line_with(pane, "differ") == "They differ from token 1 on: a token without text or “⏎⇥”"


async def test_together_is_labelled():
    async with showing(replace(DONE, together=True)) as (pane, _):
        assert "together: they share the memory" in line_with(pane, "together")


async def test_a_problem_stands_in_its_column():
    problem = "llama.cpp's llama-server was not found. Install llama.cpp."
    view = replace(DONE, right=EngineAnswer("llama.cpp", problem=problem), same=0)
    async with showing(view) as (pane, _):
        assert "⚠ llama.cpp's llama-server was not found" in "\n".join(lines(pane))
        assert "The water falls" in lines(pane)[1]
        assert line_with(pane, "decode") == "decode 57.4 tok/s –"
        assert line_with(pane, "compared") == "The texts cannot be compared."


async def test_a_long_problem_is_read_from_its_beginning():
    view = replace(DONE, right=EngineAnswer("llama.cpp", problem="It was not found. " + "Look for it. " * 30))
    async with showing(view, (60, 20)) as (pane, pilot):
        await pilot.pause()
        assert "It was not found." in "\n".join(lines(pane))


async def test_the_prompt_and_the_keys_of_the_focus():
    async with showing(replace(DONE, asked="Why does\nwater fall?")) as (pane, pilot):
        assert "Why does water fall?" in lines(pane)[0]
        assert "t together or in turn" in line_with(pane, "greedy")
        pane.blur()
        await pilot.pause()
        assert line_with(pane, "greedy") == "in turn · greedy · Tab: keys of this pane"


@pytest.mark.parametrize(
    ("height", "kept", "left_out"), [(14, "first token", "prefill"), (8, "decode", "first token")]
)
async def test_low_panes_leave_figures_out_for_the_texts(height, kept, left_out):
    async with showing(replace(DONE, asked="Why?"), (60, height)) as (pane, _):
        shown = "\n".join(lines(pane))
        assert kept in shown and left_out not in shown
        assert "falls, a little" in " ".join(shown.split())


@thorough
async def test_narrow_panes_have_one_column_above_the_other():
    async with showing(DONE, (50, 30)) as (pane, pilot):
        left, right = pane.query(AnswerText)
        assert left.region.width == right.region.width == 50
        assert left.region.bottom <= right.region.y
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert left.region.right <= right.region.x
    async with showing(DONE, (20, 12)) as (pane, _):  # nothing fits, nothing breaks
        assert lines(pane)


async def test_what_engines_say_is_data():
    hostile = EngineAnswer(
        name="llama\x1b[31m.cpp",
        about="[bold]b1[/]",
        text="\x1b]0;x\x07[red]text[/] \x9b2J",
        problem="\x1b[2J!",
    )
    async with showing(ComparisonData(hostile, hostile)) as (pane, _):
        shown = "\n".join(lines(pane))
        assert "\x1b" not in shown and "\x9b" not in shown and "\x07" not in shown
        assert "[bold]b1[/]" in shown and "[red]text[/]" in shown


async def test_a_long_text_is_followed_to_its_end():
    text = "\n".join(f"line {i}" for i in range(3000))
    view = replace(DONE, left=replace(LEFT, text=text, same=len(text)))
    async with showing(view) as (pane, pilot):
        await pilot.pause()
        assert any("line 2999" in line for line in lines(pane))
        assert not any("line 0 " in line for line in lines(pane))
        pane.data = replace(view, left=replace(view.left, text=text + "\nline 3000"))
        await pilot.pause()
        await pilot.pause()
        assert any("line 3000" in line for line in lines(pane))
        await pilot.resize_terminal(70, 30)
        await pilot.pause()
        assert any("line 3000" in line for line in lines(pane))
        pane.scroll_pages(-1)
        await pilot.pause()
        pane.data = replace(view, left=replace(view.left, text=text + "\nline 3000\nline 3001"))
        await pilot.pause()
        assert not any("line 3001" in line for line in lines(pane)), "the user reads above"


async def test_only_what_changed_is_drawn_again():
    async with showing(DONE) as (pane, pilot):
        left, right = pane.query(".text")
        drawn: list[object] = []
        for text in (left, right):
            text.update = drawn.append  # type: ignore[method-assign]
        pane.data = replace(DONE, right=replace(RIGHT, text=RIGHT.text + " x"))
        await pilot.pause()
        assert len(drawn) == 1


@pytest.mark.parametrize(("key", "message"), [("r", "Again"), ("t", "ModeChanged"), ("escape", "Closed")])
async def test_keys(key, message):
    async with showing(DONE) as (pane, pilot):
        pane.focus()
        await pilot.press(key)
        await pilot.pause()
        [sent] = pilot.app.messages
        assert type(sent).__name__ == message
