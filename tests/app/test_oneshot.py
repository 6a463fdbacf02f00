import io

import pytest

from app.oneshot import TextOutput
from tests.app.fake_engine import READY, STARTED, reply


@pytest.mark.parametrize("beyond, says", [(1, "cut: the context of 8192 tokens is full"), (0, "")])
def test_a_reply_that_the_context_cuts_short_says_so(beyond, says):
    out, messages = io.StringIO(), io.StringIO()
    output = TextOutput(out, messages)
    end = {"reason": "length", "context_used": READY.context_length + beyond}
    for event in (*STARTED, *reply("Because", **end)):
        output.show(event)
    assert out.getvalue() == "Because\n"
    assert says in messages.getvalue() and messages.getvalue().count("\n") == bool(says)
