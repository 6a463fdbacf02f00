"""Prompts of many clients, one after the other."""

import gc
import weakref
from types import SimpleNamespace

from engine.errors import UsageError
from engine.protocol import worker
from engine.protocol.client_turns import ClientTurns
from engine.protocol.events import Generate, TokenIds


def request(client, number):
    return Generate(request_id=number, prompt=TokenIds(ids=()), client=client)


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


def test_a_prompt_that_is_refused_is_not_kept():
    """Nor until garbage is collected, which is seldom beside long texts."""

    class LongText:
        pass

    def refuse(request, report):
        texts.append(weakref.ref(text := LongText()))
        raise UsageError(f"not {text}")

    server = SimpleNamespace(_reporter=lambda started: None)
    texts, model = [], SimpleNamespace(begin=refuse)
    gc.disable()
    try:
        refused = worker._Server._begun(server, model, request("one", 1))
        assert isinstance(refused, UsageError) and texts[0]()
        del refused
        assert not texts[0]()
    finally:
        gc.enable()
