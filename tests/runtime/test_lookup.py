import random

from engine.runtime.lookup import KEY_TOKENS, LONGEST_MATCH, NO_GUESS, Lookup


def guess(text, n=4):
    return Lookup().guess(text, n)


def test_what_followed_the_last_tokens_the_last_time():
    assert guess([1, 2, 3, 4, 5, 9, 1, 2, 3]) == ((4, 5, 9, 1), 3)
    assert guess([1, 2, 3, 4, 0, 1, 2, 3, 5, 7, 1, 2, 3], 2) == ((5, 7), 3)  # the latest place
    assert guess([8, 1, 2, 3, 4, 8, 1, 2, 3], 1) == ((4,), 4)


def test_nothing_is_guessed_of_what_is_new():
    assert guess([1, 2, 3, 4]) == guess([1, 2]) == guess([]) == NO_GUESS
    assert guess([1, 2, 3, 4, 2, 3]) == NO_GUESS  # only two tokens are the same


def test_a_short_piece_goes_on():
    assert guess([7, *[1, 2] * 5], 5) == ((1, 2, 1, 2, 1), 8)
    assert guess([5] * 300, 3) == ((5, 5, 5), LONGEST_MATCH)


def test_a_text_that_grows_gives_what_the_whole_text_gives():
    draw, grown, text = random.Random(0), Lookup(), []
    for _ in range(500):
        text += draw.choices(range(4), k=draw.choice([1, 1, 2, 9]))
        assert grown.guess(text, 5) == guess(text, 5)
    assert len(grown._ends) <= 4**KEY_TOKENS
