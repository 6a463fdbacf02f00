"""Formulas, code with tabs, diffs, links and footnotes: what the eye meets in a reply."""

import io

import pytest
from rich.console import Console

from widgets.markdown import inline
from widgets.markdown.formulas import to_unicode
from widgets.markdown.stream import StreamedMarkdown


def rows(text, width=60):
    document = StreamedMarkdown()
    for piece in text.partition("2"):
        document.append(piece)
    return document.lines(width)


def shown(text):
    return "\n".join(line.content.plain.rstrip() for line in rows(text))


@pytest.mark.parametrize(
    ("tex", "drawn"),
    [
        (r"a^2 + b^2 = c^2", "a² + b² = c²"),
        (r"x_{10}^{-1}", "x₁₀⁻¹"),
        (r"\frac{1}{2} m v^2", "1/2 m v²"),
        (r"\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", "(-b ± √(b² - 4ac))/2a"),
        (r"\alpha \leq \beta \cdot 10^{23}", "α ≤ β · 10²³"),
        (r"\mathbb{R}, 90^\circ, \text{if } x \in A", "ℝ, 90°, if x ∈ A"),
        (r"x^23", "x²3"),
        (r"\hat{x}", None),
        (r"a^{q}", None),
        (r"\begin{matrix} a \end{matrix}", None),
        (r"\sqrt[3]{x}", None),
        ("{a", None),
        ("a}", None),
        ("a^", None),
        ("{" * 3000, None),
    ],
)
def test_formulas_are_drawn_only_where_that_is_exact(tex, drawn):
    assert to_unicode(tex) == drawn


def test_formulas_in_text():
    assert shown(r"So \(a^2\) holds.") == "So a² holds."
    assert shown(r"So \(\hat{a}^2\) holds.") == r"So \(\hat{a}^2\) holds."
    assert shown("\\[\nE\n= m c^2\n- 1\n\\]\n\nYes.") == "E = m c² - 1\n\nYes."
    assert shown("It costs $5 and $6, and $x^2$ is *nice*.") == "It costs $5 and $6, and x² is nice."
    assert shown(r"an unfinished \(a^2") == "an unfinished (a^2"
    assert shown("`\\(a^2\\)`") == r"\(a^2\)"


def test_tabs_in_code_do_not_shift_colours():
    [line] = rows("```python\n\tx = 12\n```")
    number = [span for span in line.content.spans if "warning" in str(span.style)]
    assert [line.content.plain[span.start : span.end] for span in number] == ["12"]


def test_lines_of_a_diff_have_colours():
    lines = rows("```diff\n-old\n+new 2\n same\n```")
    styles = [{str(span.style) for span in line.content.spans} for line in lines]
    assert any("error" in style for style in styles[0]) and any("success" in style for style in styles[1])
    assert not any("error" in style or "success" in style for style in styles[2])


def test_links_reach_the_terminal_if_they_are_of_the_web():
    def links(text):
        spans = [span for line in rows(text) for span in line.content.spans]
        return [span.style.link for span in spans if getattr(span.style, "link", None)]

    assert links("[here](https://a.example/2)") == ["https://a.example/2"]
    assert links("[mail](mailto:a@b.example)") == ["mailto:a@b.example"]
    assert links("[x](ftp://a.example) [y](file:///etc/passwd) [z](a.html)") == []
    assert all(link.isprintable() for link in links("[a](<https://a.example/\x1b]0;x\x07>)"))
    console = Console(file=io.StringIO(), force_terminal=True)
    [line] = rows("[here](https://a.example/2)")
    style = line.content.spans[0].style.rich_style
    console.print("here", style=style)
    assert "\x1b]8;" in console.file.getvalue()


def test_addresses_are_shown_where_terminals_have_no_links(monkeypatch):
    monkeypatch.setattr(inline, "TERMINAL_HAS_LINKS", False)
    assert shown("See [here](https://a.example/2).") == "See here (https://a.example/2)."


def test_footnotes_and_tasks():
    assert shown("True[^1].\n\n[^1]: As said in 12.") == "True¹.\n\n¹: As said in 12."
    assert shown("- [ ] open\n- [x] done") == "☐ open\n☑ done"
