"""A comparison as text, for a terminal or a file."""

import json

from msgspec import to_builtins

from widgets.dashboard.comparison_data import (
    ComparisonData,
    conditions,
    figure_rows,
    ratio_text,
    text_comparison,
)
from widgets.text import clean, one_line


def report(view: ComparisonData, *, as_json: bool = False) -> str:
    """The text of the other engine if it differs, the figures of both, and a verdict; as JSON, one object on a line.
    `view` is of a comparison that is complete."""
    if as_json:
        return json.dumps({"event": "comparison"} | to_builtins(view)).replace("\x7f", "\\u007f") + "\n"
    left, right = view.left, view.right
    lines = [""]
    for side in (left, right):
        if side.problem:
            lines += [one_line(f"{side.name}: {side.problem}"), ""]
    if view.difference:
        lines += [f"{one_line(right.name)} says:", clean(right.text).strip("\n"), ""]
    lines.append(f"{'':<20}  {one_line(left.name):>24}  {'':<9}  {one_line(right.name):<24}".rstrip())
    for left_figure, label, ratio, right_figure in figure_rows(view):
        lines.append(f"{label:<20}  {left_figure:>24}  {ratio_text(ratio):^9}  {right_figure:<24}".rstrip())
    return "\n".join([*lines, f"{text_comparison(view)} ({conditions(view)})", ""])
