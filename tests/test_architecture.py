"""The code keeps to the arrows of ARCHITECTURE.md, and to the libraries that each room may know."""

import ast
import subprocess
import sys

import pytest

from tests.architecture import TOP, cycle, described, imports, missing_names, modules, room_of, table
from tests.paths import ROOT

FORBIDDEN = {
    "engine": {"textual", "rich", "prompt_toolkit"},
    "widgets": {"tinygrad"},
    "presets": {"tinygrad", "textual"},
}
PACKAGES = {"app", "engine", "engine/protocol"}  # folders whose __init__ holds nothing


@pytest.fixture(scope="module")
def trees():
    return modules(ROOT)


@pytest.fixture(scope="module")
def rooms():
    return table((ROOT / "ARCHITECTURE.md").read_text("utf-8"))


def forbidden_imports(trees, rooms, known) -> list[str]:
    """What modules import against the table, and those that lie in no room of it. `known`: the names of all."""
    found = []
    for module, tree in trees.items():
        if (room := room_of(module, rooms.keys())) is None:
            if module not in PACKAGES:
                found.append(f"{module} lies in no room")
            continue
        for target in imports(tree, known):
            if target.split("/")[0] in TOP and target not in PACKAGES:
                other = room_of(target, rooms.keys())
                if other != room and other not in rooms[room]:
                    found.append(f"{module} imports {target}, and {room} may not import {other}")
    return found


def test_the_rooms_are_described_in_the_order_in_which_they_import(rooms):
    assert described((ROOT / "ARCHITECTURE.md").read_text("utf-8")) == [*rooms]


def test_rooms_import_what_the_table_says_and_nothing_else(trees, rooms):
    assert forbidden_imports(trees, rooms, set(trees)) == []


def test_every_room_and_arrow_of_the_table_is_in_the_code(trees, rooms):
    row = _rows(rooms)
    used: dict[str, set[str]] = {first: set() for first in row.values()}
    for module, tree in trees.items():
        if room := room_of(module, rooms.keys()):
            targets = {room_of(target, rooms.keys()) for target in imports(tree, trees.keys())}
            used[row[room]] |= {room, *filter(None, targets)}
    unused = {room: allowed - used[row[room]] for room, allowed in rooms.items()}
    assert not {room: arrows for room, arrows in unused.items() if arrows}


def test_neither_rooms_nor_files_form_a_circle(trees, rooms):
    row = _rows(rooms)
    assert cycle({row[room]: {row[other] for other in rooms[room]} - {row[room]} for room in rooms}) == []
    files = {
        module: set(imports(tree, trees.keys())) & trees.keys() - {module} for module, tree in trees.items()
    }
    assert cycle(files) == []


def _rows(rooms) -> dict[str, str]:
    """The first room of each room's row. Rooms of one row allow the same, themselves among it."""
    return {room: min(other for other in rooms if rooms[other] == rooms[room]) for room in rooms}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("widgets/chat/prompt", "from app.chat.session import Session"),
        ("engine/formats/gguf", "import engine.loading.weights"),
        ("engine/errors", "from engine.protocol import worker"),
        ("app/chat/history", "def f():\n    from app.screens.chat_app import ChatApp"),
        ("app/nowhere", ""),
    ],
)
def test_an_arrow_that_is_turned_round_is_found(trees, rooms, module, line):
    [found] = forbidden_imports({module: ast.parse(line)}, rooms, set(trees))
    assert found.startswith(module)


def test_a_circle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_checks_of_kernels_import_names_that_are_there(trees):
    """Neither mypy nor a commit's tests read those that are thorough."""
    checks = [ast.parse(file.read_text("utf-8")) for file in (ROOT / "tests/kernels/gpu").glob("check_*.py")]
    assert checks and [name for check in checks for name in missing_names(check, trees)] == []
    lost = ast.parse("from engine.errors import OrinError, Nothing\nfrom engine.protocol import events")
    assert missing_names(lost, trees) == ["engine/errors.Nothing"]


def test_libraries_stay_in_their_rooms(trees):
    for module, tree in trees.items():
        never = FORBIDDEN.get(module.split("/")[0], set())
        found = {target.split("/")[0] for target in imports(tree, set(trees))} & never
        assert not found, f"{module} imports {found}"


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        # The last one is imported before the options are known that tinygrad reads (`engine.protocol.worker`).
        ("app.chat.session, app.chat.model_list, engine.model.pending_encoder", {"textual", "tinygrad"}),
        ("app.screens.chat_app", {"tinygrad", "numpy", "mcp", "PIL", "httpx", "jinja2"}),
    ],
)
def test_what_starts_imports_no_more_than_it_needs(imported, heavy):
    script = f"import sys, {imported}; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_files_are_short():
    long = {
        str(file.relative_to(ROOT)): lines
        for top, names in (*((top, "*.py") for top in (*TOP, "tests")), ("docs", "*.md"))
        for file in (ROOT / top).rglob(names)
        if (lines := len(file.read_text("utf-8").splitlines())) > 500
    }
    assert not long
