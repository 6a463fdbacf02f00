"""Prompts of many clients, one after the other."""

import gc
import threading
import weakref
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from engine.errors import UsageError
from engine.protocol import client_turns, fairness, worker
from engine.protocol.client_turns import ClientTurns, PromptMakers
from engine.protocol.events import Chat, Generate, Grammar, Message, Picture, TokenIds
from engine.protocol.inbox import Begun, Known


def request(client, number, connection=0):
    return Generate(request_id=number, prompt=TokenIds(ids=()), client=client, connection=connection)


def seeing(client, number):
    message = Message(role="user", content="", pictures=(Picture(data=b""),))
    return replace(request(client, number), prompt=Chat(messages=(message,)))


def test_clients_take_turns():
    turns = ClientTurns()
    for number in range(4):
        turns.put(request("many", number))
    first = turns.take()
    for client, number in (("one", 10), ("two", 20), ("one", 11)):
        turns.put(request(client, number))
    order = [turns.take().request_id for _ in range(6)]
    assert first.request_id == 0
    assert order == [10, 20, 1, 11, 2, 3]


def test_names_that_a_client_gives_itself_share_its_turns():
    turns = ClientTurns()
    for number in range(4):
        turns.put(request(f"name {number}@10.0.0.1", number))
    turns.put(request("10.0.0.2", 10))
    first, second = turns.take(), turns.take()
    turns.put(request("10.0.0.2", 11))
    order = [turns.take().request_id for _ in range(4)]
    assert [first.request_id, second.request_id, *order] == [0, 10, 1, 11, 2, 3]


def test_connections_of_one_address_without_a_name_take_turns():
    turns = ClientTurns()
    for number in range(4):
        turns.put(request("10.0.0.1", number, connection=40_000))
    turns.put(request("10.0.0.1", 10, connection=40_002))
    assert [turns.take().request_id for _ in range(3)] == [0, 10, 1]


def test_who_opens_hundreds_of_connections_has_few_turns_before_a_name():
    turns = ClientTurns()
    for number in range(400):
        turns.put(request("10.0.0.1", number, connection=40_000 + 2 * number))
    turns.put(request("ann@10.0.0.1", 1000))
    order = [turns.take().request_id for _ in range(fairness.UNNAMED + 1)]
    assert order[-1] == 1000 and order[:-1] == [*range(fairness.UNNAMED)]


def test_short_prompts_do_not_wait_for_long_ones():
    made, long_may_end = SimpleQueue(), threading.Event()

    def make(request):
        if request.client == "long":
            long_may_end.wait(30)
        made.put(request.request_id)
        yield from ()

    makers = PromptMakers(make)
    for number in range(3):
        makers.put(request("long", number), 200 << 10)
    makers.put(replace(request("long", 3), grammar=Grammar(kind="lark", source="start: /a/")), 100)
    makers.put(seeing("long", 4), 100)
    makers.put(request("short", 10), 100)
    assert made.get(timeout=30) == 10
    long_may_end.set()
    assert {made.get(timeout=30) for _ in range(5)} == {0, 1, 2, 3, 4}


def test_pictures_of_a_client_do_not_keep_those_of_others_until_all_are_read(monkeypatch):
    monkeypatch.setattr(client_turns, "TURN_S", 0.0)
    read, go = SimpleQueue(), threading.Event()

    def make(request):
        go.wait(30)
        for picture in range(3 if request.client == "many" else 1):
            read.put((request.request_id, picture))
            yield False

    makers = PromptMakers(make)
    for client, number in (("many", 0), ("many", 1), ("one", 10)):
        makers.put(seeing(client, number), 100)
    go.set()
    order = [read.get(timeout=30) for _ in range(7)]
    assert order == [(0, 0), (10, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_small_pictures_do_not_wait_for_a_large_one():
    read, go = SimpleQueue(), threading.Event()

    def make(request):
        if request.client == "large":
            yield True
            go.wait(30)
        read.put(request.request_id)
        yield False
        read.put(request.request_id + 1)

    makers = PromptMakers(make)
    for client, number in (("large", 0), ("small", 10), ("large", 20)):
        makers.put(seeing(client, number), 100)
    assert [read.get(timeout=30) for _ in range(2)] == [10, 11]
    go.set()
    assert [read.get(timeout=30) for _ in range(4)] == [0, 1, 20, 21]


def test_the_prompt_of_a_cancelled_request_is_not_made():
    known, begun = Known(5), SimpleQueue()
    known.stop.set()
    inbox = SimpleNamespace(known=lambda id: known, put=begun.put)
    server, model = SimpleNamespace(_inbox=inbox), SimpleNamespace(read_pictures=lambda request: iter([1]))
    server._begun = partial(worker._Server._begun, server)
    assert not [*worker._Server._begin(server, model, request("one", 1))]
    assert begun.get(timeout=30) == Begun(1, None)


def test_a_prompt_that_is_refused_is_not_kept():
    """Nor until garbage is collected, which is seldom beside long texts."""

    class LongText:
        pass

    def refuse(request, report):
        texts.append(weakref.ref(text := LongText()))
        raise UsageError(f"not {text}")

    server = SimpleNamespace(_reporter=lambda started: None)
    texts, model = [], SimpleNamespace(begin=refuse, read_pictures=lambda request: iter(()))
    gc.disable()
    try:
        making = worker._Server._begun(server, model, request("one", 1), lambda: False)
        with pytest.raises(StopIteration) as end:
            next(making)
        assert isinstance(end.value.value, UsageError) and texts[0]()
        del end, making
        assert not texts[0]()
    finally:
        gc.enable()
