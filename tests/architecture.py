"""The imports of the project as edges between rooms, and the rooms of ARCHITECTURE.md's table."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Set
from pathlib import Path

TOP = ("app", "engine", "presets", "tools", "widgets")
_DESCRIBED = re.compile(r"^\| (?P<rooms>`[^|]+?) \| [^|]+ \| [^|]*\|$", re.MULTILINE)
_ROW = re.compile(r"^\| (?P<rooms>`[^|]+?) \| (?P<knows>[^|]+?) \|$", re.MULTILINE)
_NAME = re.compile(r"`([\w/]+)`")


def described(text: str) -> list[str]:
    """The rooms of which ARCHITECTURE.md says what they are."""
    return [room for row in _DESCRIBED.finditer(text) for room in _NAME.findall(row["rooms"])]


def table(text: str) -> dict[str, set[str]]:
    """Each room in ARCHITECTURE.md, a folder or a file as `engine/protocol/events`, and those that it may import."""
    rows = [(_NAME.findall(row["rooms"]), _NAME.findall(row["knows"])) for row in _ROW.finditer(text)]
    return {room: {*rooms, *knows} for rooms, knows in rows for room in rooms}


def modules(root: Path) -> dict[str, ast.Module]:
    """The syntax trees of all modules of the project, by name as `engine/protocol/events`."""
    files = [file for top in TOP for file in (root / top).rglob("*.py")]
    return {_module(file.relative_to(root)): ast.parse(file.read_text("utf-8")) for file in files}


def imports(tree: ast.Module, known: Set[str]) -> Iterator[str]:
    """The modules among `known` that a module imports, wherever it does, and packages outside the project."""
    for node in _imports(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in node.names)
        elif node.module:
            package = node.module.replace(".", "/")
            for alias in node.names:
                yield inner if (inner := f"{package}/{alias.name}") in known else package


def missing_names(tree: ast.Module, trees: dict[str, ast.Module]) -> list[str]:
    """What a module imports from modules of the project and is not there, as `engine/errors.Name`."""
    found = []
    for node in _imports(tree):
        if isinstance(node, ast.ImportFrom) and (package := (node.module or "").replace(".", "/")) in trees:
            there = _names(trees[package])
            names = {alias.name for alias in node.names if f"{package}/{alias.name}" not in trees}
            found += [f"{package}.{name}" for name in sorted(names - there)]
    return found


@functools.cache
def _names(tree: ast.Module) -> set[str]:
    """The names that a module's own statements bind."""
    found = {alias.asname or alias.name.split(".")[0] for node in _imports(tree) for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
            found |= {inner.id for inner in stored if isinstance(inner.ctx, ast.Store)}
    return found


@functools.cache
def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Statements alone are looked at, a tenth of the nodes of a tree."""
    found, left = [], [*tree.body]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            left += inner if isinstance(inner, list) else []
    return found


def room_of(module: str, rooms: Set[str]) -> str | None:
    """The innermost room that a module lies in; None if it lies in none."""
    parts = module.split("/")
    prefixes = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in rooms), None)


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The nodes of a cycle in a directed graph, in their order; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node not in done:
            for target in sorted(edges.get(node, ())):
                if found := visit(target, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := visit(node, []))), [])


def _module(path: Path) -> str:
    name = path.with_suffix("").as_posix()
    return name.removesuffix("/__init__")
