"""What a sentence names that tells a user which command to type."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from engine.system.invocation import call, installed_version, pip_install


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with the environment that `make chat` sets up, as the current folder."""
    scripts = tmp_path / "check out/.venv/bin"
    scripts.mkdir(parents=True)
    _program(scripts / "python")
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(scripts.parents[1])
    return scripts.parents[1]


def _program(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_the_command_of_a_user(checkout, tmp_path, monkeypatch):
    assert call("--continue") == ".venv/bin/python -m app --continue", "nothing is installed"
    _program(checkout / ".venv/bin/orin-chat")
    assert call("--continue") == ".venv/bin/orin-chat --continue", "after make chat"
    monkeypatch.chdir(tmp_path)
    assert call("models") == "'check out/.venv/bin/orin-chat' models"
    monkeypatch.chdir("/")
    assert call("models") == f"'{checkout}/.venv/bin/orin-chat' models".replace("'/", "'", 1)
    _program(tmp_path / "bin/orin-chat")
    assert call("models") == "orin-chat models", "on the PATH"


def test_packages_are_installed_for_this_python(checkout):
    assert pip_install("starlette", "uvicorn") == ".venv/bin/python -m pip install starlette uvicorn"


def test_a_current_folder_that_is_gone(checkout, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert call("stop") == f"'{checkout}/.venv/bin/python' -m app stop"


def test_versions_of_packages_are_found_beside_them() -> None:
    for package in ("tinygrad", "numpy"):
        assert installed_version(package) == metadata.version(package)
    with pytest.raises(metadata.PackageNotFoundError):
        installed_version("no-such-package")
