"""Commands that begin with "/": what is meant by those that do not exist."""

import pytest

from app.chat.commands import _OF_OTHERS, COMMANDS, split
from engine.errors import UsageError


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("/exit", "/quit"),
        ("/clear", "/new"),
        ("/modle qwen", "/model"),
        ("/sumary", "/summary"),
        ("/xyz", ""),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_one_that_does(typed, meant):
    with pytest.raises(UsageError) as refused:
        split(typed)
    assert (f"Is {meant} meant?" in str(refused.value)) == bool(meant)


def test_what_other_chats_call_their_commands_is_here():
    assert set(_OF_OTHERS.values()) <= COMMANDS.keys() and not _OF_OTHERS.keys() & COMMANDS.keys()
