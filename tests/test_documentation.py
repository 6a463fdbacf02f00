"""The documentation names files and headings that exist."""

import re
from functools import cache

import pytest

from tests.architecture import TOP
from tests.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]*)(?:#(?P<anchor>[^)]+))?\)")
DEFINED = re.compile(r"`(?P<name>\w+)`\s(?:in|of)\s+\[[^\]]*\]\((?P<path>[^)#:]+\.py)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)[`(]")
PATH = re.compile(rf"`((?:{'|'.join((*TOP, 'tests', 'docs'))})(?:/[\w.-]+)+)/?`")


@cache
def anchors(page: str) -> set[str]:
    """The anchors of a Markdown page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in LINK.finditer(page.read_text("utf-8")):
        target = page.parent / link["path"] if link["path"] else page
        assert target.exists(), link[0]
        assert not link["anchor"] or link["anchor"] in anchors(target.read_text("utf-8")), link[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_text_exist(page):
    paths = set(PATH.findall(page.read_text("utf-8"))) - {
        "presets/guide",
        "presets/NAME.toml",
        "widgets/dashboard/NAME.py",
    }
    missing = {path for path in paths if not any((ROOT / f"{path}{end}").exists() for end in ("", ".py"))}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_before_a_link_to_a_module_are_defined_there(page):
    for link in DEFINED.finditer(page.read_text("utf-8")):
        module = (page.parent / link["path"]).read_text("utf-8")
        assert re.search(rf"^(?:class |def )?{link['name']}\b", module, re.MULTILINE), link[0]


@cache
def words_of_the_code() -> set[str]:
    files = (file for top in (*TOP, "tests") for file in (ROOT / top).rglob("*.py"))
    return {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_names_in_the_text_are_those_of_the_code(page):
    names = {part for name in NAME.findall((ROOT / page).read_text("utf-8")) for part in name.split(".")}
    missing = names - words_of_the_code()
    assert not missing


def test_the_checks_are_able_to_fail():
    assert NAME.findall("`Steps.no_such`, `Generate(Chat(x))` and `a b`") == ["Steps.no_such", "Generate"]
    assert PATH.findall("`app/nowhere` and `engine/model/`") == ["app/nowhere", "engine/model"]
    assert DEFINED.search("`A` in\n  [b](b.py)")["path"] == "b.py" and not DEFINED.search("`A` in [b](b.md)")
    assert LINK.search("[a](b.md#c)")["anchor"] == "c" and anchors("## How a `b` goes, at 4k") == {
        "how-a-b-goes-at-4k"
    }
