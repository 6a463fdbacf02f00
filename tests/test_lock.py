"""requirements.lock: every library that pyproject.toml names, of a version that it allows, with hashes."""

import os
import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

EXTRAS = ("cpu", "gpu", "mcp", "serve")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LOCK = (ROOT / "requirements.lock").read_text("utf-8")
ENTRY = re.compile(
    r"^(?P<what>[\w.-]+==[^\\\n]+?) \\\n(?P<hashes>(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)
LOCKED = [Requirement(entry["what"]) for entry in ENTRY.finditer(LOCK)]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")


def test_every_line_is_a_version_with_hashes():
    rest = ENTRY.sub("", LOCK)
    assert all(line.startswith("#") for line in rest.splitlines()), rest
    assert "://" not in LOCK


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_it_has_what_the_project_needs(python, machine):
    where = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "platform_machine": machine,
        "sys_platform": "linux",
    }
    pins = [lock for lock in LOCKED if lock.marker is None or lock.marker.evaluate(where)]
    names = [canonicalize_name(pin.name) for pin in pins]
    assert len({*names}) == len(names)
    versions = {name: str(next(iter(pin.specifier)).version) for name, pin in zip(names, pins, strict=True)}
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    wanted += [need for extra in EXTRAS for need in project["optional-dependencies"][extra]]
    for need in map(Requirement, wanted):
        assert need.specifier.contains(versions[canonicalize_name(need.name)], prereleases=True), need


@pytest.mark.skipif(not os.environ.get("ORIN_LOCKED"), reason="`make check` installs what the lock names")
def test_what_is_installed_is_what_is_locked():
    for lock in LOCKED:
        if lock.name != "setuptools" and (lock.marker is None or lock.marker.evaluate()):
            with suppress(PackageNotFoundError):  # of an extra that is not installed
                assert lock.specifier.contains(version(lock.name), prereleases=True), lock
