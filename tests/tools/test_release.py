"""The wheel and its bill of materials."""

import re
import zipfile

from tests.paths import ROOT
from tests.test_lock import LOCK, LOCKED
from tests.thorough import thorough
from tools.release import bill_of_materials, build, committed, wrong_contents


def test_what_a_wheel_lacks_and_what_no_commit_has_is_named(tmp_path):
    wheel = tmp_path / "orin_chat-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "app/main.py",
            "engine/stray.py",
            "tests/test_lock.py",
            "orin_chat-1.dist-info/METADATA",
        ):
            archive.writestr(name, "")
    assert wrong_contents(wheel, ["app/main.py", "presets/max.toml", "tests/test_lock.py", "Makefile"]) == [
        "orin_chat-1-py3-none-any.whl lacks presets/max.toml",
        "orin_chat-1-py3-none-any.whl holds engine/stray.py, which is in no commit",
        "orin_chat-1-py3-none-any.whl holds tests/test_lock.py, which is in no commit",
    ]


@thorough
def test_the_wheel_holds_what_the_commit_does(tmp_path):
    assert wrong_contents(build(tmp_path), committed()) == []


def test_the_bill_names_every_library_of_the_lock_with_its_hashes():
    bill = bill_of_materials(LOCK)
    assert bill["metadata"]["component"]["name"] == "orin-chat"
    named = {(each["name"], each["version"]) for each in bill["components"]}
    assert named == {(lock.name, next(iter(lock.specifier)).version) for lock in LOCKED}
    assert sum(len(each["hashes"]) for each in bill["components"]) == LOCK.count("--hash=sha256:")


def test_actions_of_continuous_integration_are_pinned_by_hash():
    [workflow] = (ROOT / ".github" / "workflows").glob("*.yml")
    used = re.findall(r"uses: (\S+)", workflow.read_text("utf-8"))
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used)
