"""A pattern of many names finds what a comparison with each of them finds, and does not take longer for more names."""

import random
import re

import pytest

from engine.formats.name_pattern import any_name


@pytest.mark.parametrize("most_names", [1, 4, 40])
def test_it_finds_the_longest_name_at_each_place(most_names):
    draw = random.Random(7)
    for _ in range(100):
        names = {"".join(draw.choices("ab]^-\\<|", k=draw.randint(1, 5))) for _ in range(most_names)}
        text = "".join(draw.choices("ab]^-\\<|", k=60))
        one_by_one = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        assert any_name(names).split(text) == re.split(f"({one_by_one})", text)


def test_names_that_only_differ_in_their_numbers_are_one_short_pattern():
    """Else each beginning of such a name in a text is compared with all names: a prompt of 1 MB took 37 s."""
    names = any_name(f"<unused{i}>" for i in range(6242))
    assert len(names.pattern) < 1000
    assert names.split("<unused6241><unused6242>") == ["", "<unused6241>", "<unused6242>"]


def test_names_that_are_beginnings_of_each_other_without_an_end():
    assert any_name("a" * n for n in range(1, 700)).split("b" + "a" * 650) == ["b", "a" * 650, ""]


def test_no_names_are_nowhere():
    assert any_name([]).split("a text") == any_name([""]).split("a text") == ["a text"]
