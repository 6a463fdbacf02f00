"""The panes of the server's screen, as lines."""

from dataclasses import replace

import pytest

from engine.protocol.events import BlockCounts, Slot, Slots
from tests.app.fake_engine import reply
from widgets.dashboard import request_list
from widgets.dashboard.block_bar import BlockBar
from widgets.dashboard.client_graph import ClientGraph, ClientThroughput, client_name
from widgets.dashboard.request_list import Handled, RequestList
from widgets.dashboard.server_head import ServerHead, ServerState
from widgets.dashboard.slot_table import SlotState, SlotTable

BINS = {number: {"10.0.0.1": 30, "10.0.0.2": 10} for number in range(100, 110)}
TWO = ClientThroughput(BINS, last=109, prefill=1200.0)
PREFILL = Slot(
    request_id=1, client="10.0.0.1", phase="prefill", prompt_done=50, prompt_n=200, predicted_n=0, rate=0
)
DECODE = Slot(
    request_id=2, client="10.0.0.2", phase="decode", prompt_done=96, prompt_n=96, predicted_n=12, rate=43.2
)


def texts(lines):
    return ["".join(text for text, _ in line) for line in lines]


def test_throughput_is_stacked_by_client():
    head, *graph, axis, legend = texts(ClientGraph().draw(TWO, 65, 12))
    assert head == "80 tok/s  prefill 1.2k tok/s"
    assert legend == "█ 10.0.0.1 60 tok/s  ░ 10.0.0.2 20 tok/s"
    assert axis.startswith("-60 s ─") and axis.endswith(" now") and len(axis) == 65
    last = [line[-1] for line in reversed(graph)]  # the newest cell from the bottom
    assert last == ["█"] * 7 + ["░"] * 2
    assert graph[0].startswith("  80 ") and all(line[5:60].strip() == "" for line in graph)


@pytest.mark.parametrize(
    ("width", "says"),
    [(65, "  first token p50 210 ms, p99 1.4 s"), (60, "  first token p50 210 ms"), (50, "")],
)
def test_how_long_requests_wait_for_their_first_token(width, says):
    data = replace(TWO, first_p50_s=0.21, first_p99_s=1.4)
    assert texts(ClientGraph().draw(data, width, 12))[0] == "80 tok/s  prefill 1.2k tok/s" + says


def test_the_last_clients_leave_their_lines_to_the_graph():
    _, *graph, axis, legend = texts(ClientGraph().draw(TWO, 26, 5))
    assert len(graph) == 2 and axis.endswith(" now") and legend == "█ 10.0.0.1 60 tok/s …"
    assert len(ClientGraph().draw(TWO, 26, 3)) == 3


def test_more_clients_than_patterns_are_others():
    tokens = {f"10.0.0.{i}": 2 for i in range(9)}
    *_, legend = texts(ClientGraph().draw(ClientThroughput({9: tokens}, last=9), 200, 12))
    assert "╳ others 4.0 tok/s" in legend and "10.0.0.4 1.0" in legend and "10.0.0.5" not in legend


def test_names_from_the_network_are_harmless():
    assert (
        client_name("\x1b[31m[b]a") == "[31m[b]a"
        and client_name("日本") == "??"
        and client_name("") == "unknown"
    )
    assert client_name("a" * 99) == "a" * 23 + "…"
    drawn = SlotTable().draw(SlotState((Slot(
        request_id=1, client="\x1b]0;x\x07", phase="decode", prompt_done=1, prompt_n=1, predicted_n=1, rate=1.0
    ),)), 60, 9)  # fmt: skip
    assert not any(ord(c) < 32 for text in texts(drawn) for c in text)


def test_slots_and_queue():
    state = SlotState((PREFILL, None, DECODE), waiting=2, refused=1)
    assert texts(SlotTable().draw(state, 70, 9)) == [
        "2 waiting · 1 refused",
        " 1 10.0.0.1        prefill  25% ██▌        50 of 200 tokens",
        " 2 idle",
        " 3 10.0.0.2        decode   43 tok/s 12 tokens after 96",
    ]
    low = texts(SlotTable().draw(state, 70, 3))
    assert low[1].startswith(" 1 10.0.0.1") and low[2] == "2 more: no room"


@pytest.mark.parametrize(
    ("step", "width", "says"),
    [
        ((32, 480, 512), 76, " · step: 32 replies, 480 of 512 prompt tokens"),
        ((32, 480, 512), 60, " · step: 32 replies, 480 prompt tokens"),
        ((32, 480, 512), 50, ""),
        ((0, 480, 512), 76, " · step: 480 of 512 prompt tokens"),
        ((1, 0, 0), 50, " · step: 1 reply"),
        ((0, 0, 0), 76, ""),
    ],
)
def test_what_the_last_step_held(step, width, says):
    assert texts(SlotTable().draw(SlotState((), 2, 1, *step), width, 9)) == ["2 waiting · 1 refused" + says]


def test_blocks_in_words_and_a_bar():
    counts = BlockCounts(free=50, held=25, cached=25)
    bar, words = texts(BlockBar().draw(Slots(slots=(), waiting=0, blocks=(counts,)), 40, 9))
    assert bar == "█" * 10 + "▒" * 10 + "·" * 20 and words == "█ 25 held · ▒ 25 kept · · 50 free"
    recurrent = Slots(slots=(), waiting=0, blocks=(counts,), checkpoints=(5, 16))
    assert texts(BlockBar().draw(recurrent, 40, 9))[2:] == ["5 of 16 checkpoints of states"]


def test_requests():
    end = reply("", predicted_n=12, predicted_ms=11 / 43 * 1e3)[-1]
    done = Handled("12:00:01", "10.0.0.1", "/v1/chat/completions", 200, end)
    refused = Handled("12:00:00", "10.0.0.1", "/v1/chat/completions", 429, problem="rate_limit_error")
    assert texts(RequestList().draw((done, refused), 90, 1)) == [
        "12:00:01 10.0.0.1        /v1/chat/completions 200 12 tokens, 43 tok/s"
    ]
    assert "429 rate_limit_error" in texts([request_list._line(refused, 60)])[0]


def test_the_head_says_how_the_server_ends_first():
    state = ServerState(
        "http://127.0.0.1:8080/v1", ("tiny", "Q6_K"), 1, 0, 96, 1200, ending="The server ends."
    )
    assert texts(ServerHead().draw(state, 80, 9)) == [
        "The server ends.",
        "http://127.0.0.1:8080/v1",
        "tiny · Q6_K",
        "1 request · 0 refused · 96 prompt tokens · 1,200 reply tokens",
    ]


@pytest.mark.parametrize(("width", "height"), [(16, 2), (1, 1), (30, 5)])
def test_small_panes(width, height):
    assert len(ClientGraph().draw(TWO, width, height)) <= height
    assert len(SlotTable().draw(SlotState((PREFILL, DECODE)), width, height)) <= height
    empty = BlockCounts(free=0, held=0, cached=0)
    assert BlockBar().draw(Slots(slots=(), waiting=0, blocks=(empty,), checkpoints=(0, 9)), width, height)
