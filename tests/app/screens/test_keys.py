"""Keys as terminals without an extended keyboard protocol send them."""

import itertools

from textual import events
from textual._xterm_parser import XTermParser

from app.screens.chat_app import ChatApp
from widgets.chat.tool_question import ANSWERS


def read(sequence, monkeypatch):
    """The keys that Textual reads of what a terminal sends, after which nothing comes for a while."""
    clock = itertools.count()
    monkeypatch.setattr("textual._parser.get_time", lambda: next(clock))
    parser = XTermParser()
    found = [*parser.feed(sequence), *parser.tick()]
    return [event.key for event in found if isinstance(event, events.Key)]


def test_each_action_with_a_letter_has_one_that_every_terminal_sends(monkeypatch):
    keys = {answer: [key] for key, answer, _ in ANSWERS}
    for binding in ChatApp.BINDINGS:
        keys[binding.action] = binding.key.split(",")
    with_letters = [each for each in keys.values() if all(key[:-1] == "alt+" for key in each)]
    assert ["alt+m", "alt+f"] in with_letters and len(with_letters) == 9
    for each in with_letters:
        assert read(f"\x1b{each[0][-1]}", monkeypatch) == [each[0]], each
    assert read("\x1bf", monkeypatch) == ["ctrl+right"]  # as Emacs and shells move by a word
