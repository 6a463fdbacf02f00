"""A clang that is kept makes what one of its own makes of each source, and leaves to it what it cannot make."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tinygrad.runtime.support.elf import jit_loader

from engine.devices import kept_clang
from engine.devices.clang import find_clang
from tests.waiting import wait_until

OPTIONS = ("-c", "-x", "c", "-O1", "--target=x86_64-none-unknown-elf", "-", "-o", "-")


@pytest.fixture
def command(monkeypatch):
    """Of the only clang that is kept."""
    monkeypatch.setattr(kept_clang, "_kept", {})
    monkeypatch.setattr(kept_clang, "_unfit", set())
    kept_clang.keep()
    yield [find_clang(), *OPTIONS]
    kept_clang.end()
    kept_clang.keep()


def process(command):
    return kept_clang._kept[tuple(command)]._process


def source(n, padding=""):
    return f"int f(int x) {{ return x + {n}; }} // {padding}".encode()


def test_it_makes_what_one_of_its_own_makes_and_the_last_source_ends_it(command):
    sources = [source(n, "more than a pipe takes" * (n == 3) * 10_000) for n in range(kept_clang.SOURCES)]
    kept_clang.compiled(command, sources[0])
    first = process(command)
    made = [kept_clang.compiled(command, text) for text in sources[1:]]
    assert first.returncode is not None and not kept_clang._kept
    for text, found in zip(sources[1:4], made, strict=False):
        alone = subprocess.check_output(command, input=text)
        assert jit_loader(found) == jit_loader(alone)
    assert len({*map(jit_loader, made)}) == len(made)
    kept_clang.compiled(command, sources[0])
    assert process(command) is not first


@pytest.mark.parametrize("failing", ["what it says", "its death"])
def test_what_it_does_not_make_is_left_to_others(command, failing):
    assert kept_clang.compiled(command, source(1))
    clang = process(command)
    if failing == "its death":
        clang.kill()
    bad = b"int f(void) { return g; }" if failing == "what it says" else source(2)
    assert kept_clang.compiled(command, bad) is None
    assert clang.returncode is not None
    assert kept_clang.compiled(command, source(3)) is None  # in this process


def test_none_is_kept_where_none_can_start_or_all_is_compiled(command):
    assert kept_clang.compiled(["/there/is/none", *command[1:]], source(1)) is None
    kept_clang.compiled(command, source(1))
    clang = process(command)
    kept_clang.end()
    assert clang.returncode is not None
    assert kept_clang.compiled(command, source(1)) is None


def test_it_ends_with_the_process_that_keeps_it_which_forks_none(command):
    assert kept_clang.compiled(command, source(1))
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:  # which has the parent's end of no pipe, and then one of its own
        known = len(kept_clang._kept)
        kept_clang.compiled(command, source(2))
        os.write(writes, f"{known} {process(command).pid}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    known, pid = os.read(reads, 100).split()
    os.close(reads)
    os.close(writes)
    assert known == b"0" and int(pid) != process(command).pid
    wait_until(lambda: not Path(f"/proc/{int(pid)}").exists())
    assert kept_clang.compiled(command, source(3))
