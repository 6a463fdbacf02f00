"""Prompts of many clients, one after the other."""

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
