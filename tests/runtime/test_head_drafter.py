"""What a draft head is given: each pair once, in the order of the text, with the stream of the token before."""

import numpy as np
import pytest

from engine.runtime.guesser import DraftTimes
from engine.runtime.head_drafter import HeadDrafter


class FakeHead:
    """Remembers pairs of tokens and streams. A stream is the number of the token that it is of. It guesses tokens that
    count up."""

    places, rows, is_ready = 100, 4, True

    def __init__(self):
        self.pairs = []

    def store(self, place, tokens, streams):
        assert len(tokens) == len(streams) and place <= len(self.pairs)
        self.pairs[place:] = zip(tokens, streams[:, 0].tolist(), strict=True)

    def draft(self, place, tokens, streams, n):
        assert 0 < len(tokens) <= self.rows
        self.store(place, tokens, streams)
        return [tokens[-1] + 1 + i for i in range(n)]


def of(*tokens):
    return np.array(tokens, np.float32)[:, None]


def opened():
    head = FakeHead()
    return head, HeadDrafter(head, 1000)


def test_a_prompt_and_its_reply():
    head, drafter = opened()
    text = list(range(10, 19))
    drafter.saw(0, text, 0, of(*text[:6]))
    drafter.saw(0, text, 6, of(*text[6:8]))
    assert drafter.guess(0, text, 2) == (19, 20)
    wanted = list(zip(text, [0, *text], strict=False))
    assert head.pairs == wanted
    text += [19, 50]  # the first guess was right, the second was not
    drafter.saw(0, text, 8, of(18, 19, 20))
    assert drafter.guess(0, text, 1) == (51,)
    assert head.pairs == list(zip(text, [0, *text], strict=False))


def test_tokens_that_were_not_seen_are_left_out():
    head, drafter = opened()
    text = list(range(10, 30))
    drafter.saw(0, text, 0, of(*text[:6]))
    assert drafter.guess(0, text, 2) == ()  # nothing is known of the last tokens
    drafter.saw(0, text, 18, of(28))
    assert drafter.guess(0, text, 1) == (30,)
    assert head.pairs == [*list(zip(text, [0, *text], strict=False))[:7], (29, 28)]


def test_of_many_tokens_without_a_guess_the_last_ones_are_stored():
    head, drafter = opened()
    head.places = 1000
    text = list(range(10, 16))
    drafter.saw(0, text, 0, of(*text[:5]))
    for token in range(16, 216):
        drafter.saw(0, text, len(text) - 1, of(text[-1]))
        text.append(token)
    assert drafter.guess(0, text, 2) == (216, 217)
    pairs = list(zip(text, [0, *text], strict=False))
    assert head.pairs == pairs[:6] + pairs[-(len(head.pairs) - 6) :]
    assert 64 <= len(head.pairs) - 6 < 80


def test_a_text_that_begins_like_the_last_one():
    head, drafter = opened()
    text = list(range(10, 19))
    drafter.saw(0, text, 0, of(*text[:8]))
    drafter.end(0)
    other = [*text[:5], 70, 71, 72]
    drafter.saw(0, other, 5, of(70, 71))
    assert drafter.guess(0, other, 1) == (73,)
    assert head.pairs == [*list(zip(text, [0, *text], strict=False))[:5], (71, 70), (72, 71)]


def test_a_prompt_that_is_read_once_more():
    head, drafter = opened()
    text = list(range(10, 30))
    drafter.saw(0, text, 0, of(*text[:19]))
    drafter.saw(0, text, 8, of(*text[8:19]))  # from a recurrent state that was kept there
    drafter.saw(0, text, 18, of(28))
    drafter.guess(0, text, 1)
    assert head.pairs == list(zip(text, [0, *text], strict=False))


def test_what_guesses_take_has_a_part_for_each_guess():
    times = DraftTimes()
    assert times.draft_s(3) == 0
    for seconds in (9.0, 0.6):  # the first one is left out
        times.drafted(seconds, 1)
    assert times.draft_s(1) == 0.6 and times.draft_s(4) == pytest.approx(2.4)
    for seconds in (9.0, 0.9):
        times.drafted(seconds, 4)
    assert times.draft_s(4) == 0.9 and times.draft_s(7) == pytest.approx(1.2)
    assert times.draft_s(2) == pytest.approx(0.7)
