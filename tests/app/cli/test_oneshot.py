import io

import pytest

from app.cli.oneshot import TextOutput
from app.cli.progress import figures, say
from tests.app.fake_engine import READY, STARTED, reply


@pytest.mark.parametrize("missing, says", [(0, "cut: the context of 8,192 tokens is full"), (1, "")])
def test_a_reply_that_the_context_cuts_short_says_so(missing, says):
    out, messages = io.StringIO(), io.StringIO()
    output = TextOutput(out, messages)
    end = {"reason": "length", "prompt_n": READY.context_length - 1 - missing, "predicted_n": 2}
    for event in (*STARTED, *reply("Because", **end)):
        output.show(event)
    assert out.getvalue() == "Because\n"
    assert says in messages.getvalue() and messages.getvalue().count("\n") == bool(says)


def test_a_prompt_that_was_nearly_all_cached_has_no_prefill_rate():
    rates = [
        "tok/s)" in figures(reply("Because", prompt_n=1000, cached_n=cached)[-1])
        for cached in (968, 969, 1000)
    ]
    assert rates == [True, False, False]


def test_a_message_is_broken_between_words_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "30")
    terminal, file = Terminal(), io.StringIO()
    for messages in (terminal, file):
        say(messages, "There is no file model.gguf.", "Check the path.")
    assert terminal.getvalue() == "orin-chat: There is no file\nmodel.gguf. Check the path.\n"
    assert file.getvalue() == "orin-chat: There is no file model.gguf. Check the path.\n"


def test_the_figures_of_one_token():
    end = reply("", prompt_n=1, prompt_ms=0.42, predicted_n=1, predicted_ms=0.0)[-1]
    assert figures(end) == "prompt 1 token (0 cached), first token after 0.4 ms; reply 1 token"


def test_a_prompt_of_which_the_server_says_nothing_is_not_said_to_have_no_tokens():
    end = reply("", prompt_n=0, prompt_ms=0.42, predicted_n=1, predicted_ms=0.0)[-1]
    assert figures(end) == "first token after 0.4 ms; reply 1 token"
