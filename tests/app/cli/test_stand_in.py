"""Folders that stand in for a home that cannot be written, and a chat there."""

import errno
import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from app.cli.stand_in import stand_in_where_needed
from engine.devices.clang import zig_clang
from tests.paths import ROOT


@pytest.fixture
def temporary(home, monkeypatch):
    """Where temporary files go."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    folder = home / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def refused(home, monkeypatch):
    """A home folder whose disk is read-only, or full."""
    whole = tempfile.TemporaryFile

    def temporary_file(dir):
        if Path(dir) in (home, *old):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(dir=dir)

    old = [home / ".cache/orin-chat", home / ".local/state/orin-chat"]
    for folder in (*old, home / ".cache/huggingface"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    return home


def test_a_home_that_can_be_written_stays(temporary):
    before = dict(os.environ)
    assert (stand_in_where_needed(), dict(os.environ)) == ("", before)
    assert not list(temporary.iterdir())


def test_what_the_old_folders_hold_can_still_be_read(refused, temporary):
    for name in (
        ".cache/orin-chat/kernels/a",
        ".cache/huggingface/hub/a",
        ".local/state/orin-chat/log/engine.log",
    ):
        (refused / name).parent.mkdir()
        (refused / name).touch()
    (refused / ".local/state/orin-chat/last-model").write_text("qwen3:0.6b")
    folder = temporary / f"orin-chat-{os.getuid()}"
    for _ in range(2):  # the second run finds the folder of the first
        for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
            os.environ.pop(variable, None)
        assert stand_in_where_needed() == (
            f"{refused}/.cache/orin-chat cannot be written: No space left on device. {folder} stands in for it."
        )
        cache, state = (Path(os.environ[name]) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"))
        assert (cache / "orin-chat/kernels/a").is_file()
        assert (cache / "huggingface/hub/a").is_file()
        assert (state / "orin-chat/last-model").read_text() == "qwen3:0.6b"
        assert not (state / "orin-chat/log").exists()
        assert folder.stat().st_mode & 0o777 == 0o700
    (refused / ".local/state/orin-chat/last-model").unlink()
    del os.environ["XDG_STATE_HOME"]
    stand_in_where_needed()
    assert not (state / "orin-chat/last-model").is_symlink()


def test_a_folder_that_others_can_open_is_not_taken(refused, temporary):
    (temporary / f"orin-chat-{os.getuid()}").mkdir(mode=0o755)
    sentence = stand_in_where_needed()
    assert str(temporary) not in sentence  # it names another place, or there is none


def test_without_a_home_folder(temporary, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    folder = temporary / f"orin-chat-{os.getuid()}"
    assert stand_in_where_needed() == f"There is no home folder. {folder} stands in for it."
    assert os.environ["HOME"] == str(folder)


def test_a_chat_and_its_compiler_need_no_home(home, temporary):
    """A file is where the home folder should be, which no user can write below, not even root."""
    environment = {**os.environ, "HOME": f"{os.devnull}/home", "TMPDIR": str(temporary)}
    chat = subprocess.run(
        [sys.executable, "-m", "tests.app.synthetic_cli", json.dumps({"text": "Yes.", "tokens": 1}), "--plain"],
        cwd=ROOT, env=environment, input="Is this kept?\nAnd this?\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert chat.returncode == 0
    assert chat.stdout.count("Yes.") == 2
    assert chat.stderr.count("stands in for it") == chat.stderr.count("chats are not saved") == 1
    assert "Traceback" not in chat.stderr
    os.environ["HOME"] = environment["HOME"]
    stand_in_where_needed()
    if script := zig_clang():
        assert Path(script).is_relative_to(temporary)
