"""Files that are read and written: pipes and devices in their place are not waited for, nor written over."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from app.chat.settings import usable_settings
from engine.system import whole_file
from engine.system.logs import open_log
from engine.system.whole_file import free_bytes, open_file, read_file, read_text, write_whole


def test_pipes_and_devices_are_no_files(tmp_path):
    pipe, file, link = tmp_path / "pipe", tmp_path / "file", tmp_path / "link"
    os.mkfifo(pipe)
    file.write_bytes(b"text")
    link.symlink_to(file)
    assert read_file(link) == b"text"
    for other in (pipe, os.devnull, tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError, match=r"not a file|Is a directory|No such file"):
            open_file(other)


def test_a_link_to_something_else_than_a_file_is_not_written_over(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in ("pipe", "."):
        (link := tmp_path / "settings.toml").symlink_to(tmp_path / place)
        with pytest.raises(OSError):
            write_whole(link, b"new")
        link.unlink()
    assert (tmp_path / "pipe").is_fifo()


def test_a_pipe_in_place_of_the_settings_or_of_a_log_is_not_waited_for(tmp_path):
    pipe = tmp_path / "settings.toml"
    os.mkfifo(pipe)
    _, [flaw] = usable_settings(pipe)
    assert "it is a pipe or a device, not a file. The defaults are used" in flaw
    with open_log(pipe) as log:
        assert log.name == os.devnull


def test_a_disk_that_knows_no_permissions_takes_files(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(errno.EPERM, "as VFAT does")

    monkeypatch.setattr(Path, "chmod", refuse)
    write_whole(tmp_path / "script", b"new", mode=0o700)
    assert read_file(tmp_path / "script") == b"new"
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with pytest.raises(PermissionError):  # a file of somebody else
        write_whole(tmp_path / "script", b"newer", mode=0o700)


def test_a_disk_may_not_say_how_much_room_it_has(tmp_path, monkeypatch):
    assert (free_bytes(tmp_path) or 0) > 0
    for answer in (OSError(errno.ENOSYS, "not implemented"), SimpleNamespace(total=0, free=0)):
        monkeypatch.setattr(whole_file.shutil, "disk_usage", Mock(side_effect=[answer]))
        assert free_bytes(tmp_path) is None


def test_a_key_of_many_names_is_refused_and_dots_in_texts_are_not(tmp_path):
    file = tmp_path / "settings.toml"
    dots = "." * 300
    file.write_text(
        fine := f'a = \'{dots}\' # {dots}\nb = """\n{dots}\n"""\nc.d = "{dots}\\"{dots}"\n'
        + "e.f = 1.5\n" * 99
    )
    assert read_text(file) == fine
    for key in ("a.b" * 101 + " = 1", "[" + "a.b" * 101 + "]", "a = {b = 1, " + "c . d" * 101 + " = 1}"):
        file.write_text(fine + key)
        with pytest.raises(ValueError, match="more than 100 names"):
            read_text(file)
