"""Formulas in TeX: drawn as Unicode where that says exactly the same, else left as they were written.

Models write `\\(a^2\\)`, `\\[…\\]`, `$$…$$` and `$…$`. Markdown alone would take the backslashes away.
"""

import re

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

_SUPER = str.maketrans(
    "0123456789+-=()niabcdefghjklmoprstuvwxyzT", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱᵃᵇᶜᵈᵉᶠᵍʰʲᵏˡᵐᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀ"
)
_SUB = str.maketrans("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_LOWER = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega"
)
_UPPER = "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega varepsilon varphi"
_GREEK = dict(zip(f"{_LOWER} {_UPPER}".split(" "), "αβγδϵζηθικλμνξπρστυϕχψωΓΔΘΛΞΠΣΦΨΩεφ", strict=True))
_SYMBOLS = _GREEK | {
    "cdot": "·", "times": "×", "div": "÷", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥",
    "ne": "≠", "neq": "≠", "approx": "≈", "equiv": "≡", "sim": "∼", "propto": "∝", "infty": "∞", "partial": "∂",
    "nabla": "∇", "sum": "∑", "prod": "∏", "int": "∫", "in": "∈", "notin": "∉", "subset": "⊂", "subseteq": "⊆",
    "cup": "∪", "cap": "∩", "emptyset": "∅", "forall": "∀", "exists": "∃", "neg": "¬", "land": "∧", "lor": "∨",
    "to": "→", "rightarrow": "→", "Rightarrow": "⇒", "implies": "⇒", "leftarrow": "←", "iff": "⇔", "mapsto": "↦",
    "ldots": "…", "dots": "…", "cdots": "⋯", "circ": "∘", "degree": "°", "angle": "∠", "perp": "⊥", "hbar": "ℏ",
    "ell": "ℓ", "langle": "⟨", "rangle": "⟩", "mid": "|", "ast": "∗", "star": "⋆", "quad": "  ", "qquad": "    ",
    "left": "", "right": "", "big": "", "Big": "", "displaystyle": "", "limits": "", "prime": "′",
    "log": "log", "ln": "ln", "exp": "exp", "sin": "sin", "cos": "cos", "tan": "tan", "lim": "lim", "max": "max",
    "min": "min", "det": "det", "gcd": "gcd", "mod": "mod", "bmod": "mod", "arg": "arg", "deg": "deg",
    ",": " ", ";": " ", ":": " ", "!": "", " ": " ", "{": "{", "}": "}", "%": "%", "$": "$", "_": "_", "&": "&",
    "#": "#", "|": "‖",
}  # fmt: skip
_LETTERS = {"R": "ℝ", "N": "ℕ", "Z": "ℤ", "Q": "ℚ", "C": "ℂ", "P": "ℙ"}
_TOKEN = re.compile(r"\\([A-Za-z]+|.)|([{}^_])|([^\\{}^_]+)", re.DOTALL)
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"))
_DOLLARS = re.compile(r"\$(?=[^\s$])([^$\n]{0,200}?[^\s$\\])\$(?!\d)")
_MOST_CHARS = 2000


class _Inexact(Exception):
    """The formula has a part that Unicode does not have."""


def to_unicode(tex: str) -> str | None:
    """The formula in Unicode; None if that would not be exact."""
    try:
        parts, at = _sequence(_TOKEN.findall(tex), 0)
    except (_Inexact, RecursionError):
        return None
    return " ".join("".join(parts).split()) if at == -1 else None


def _sequence(tokens: list[tuple[str, str, str]], at: int) -> tuple[list[str], int]:
    """The parts from a token on, up to a closing brace, and the place of that (-1: there is none)."""
    parts: list[str] = []
    while at < len(tokens):
        _, mark, text = tokens[at]
        if mark == "}":
            return parts, at
        if mark and mark in "^_":
            argument, at = _argument(tokens, at + 1)
            parts.append(_raised(argument, _SUPER if mark == "^" else _SUB))
        elif text:
            parts.append(text)
            at += 1
        else:
            argument, at = _argument(tokens, at)
            parts.append(argument)
    return parts, -1


def _argument(tokens: list[tuple[str, str, str]], at: int) -> tuple[str, int]:
    """What a command or a mark applies to, and the token after it."""
    if at >= len(tokens):
        raise _Inexact
    name, mark, text = tokens[at]
    if mark == "{":
        parts, end = _sequence(tokens, at + 1)
        if end < 0:
            raise _Inexact
        return "".join(parts), end + 1
    if text:
        if not text.strip():
            return _argument(tokens, at + 1)
        text = text.lstrip()
        tokens[at] = ("", "", text[1:])  # the rest comes next
        return text[0], at if text[1:] else at + 1
    if name in ("text", "mathrm", "operatorname", "mathbf", "mathit", "textbf", "boxed", "mathsf"):
        return _argument(tokens, at + 1)
    if name == "mathbb":
        letter, at = _argument(tokens, at + 1)
        if letter not in _LETTERS:
            raise _Inexact
        return _LETTERS[letter], at
    if name == "sqrt":
        root, at = _argument(tokens, at + 1)
        if root.startswith("["):
            raise _Inexact
        return f"√{_grouped(root)}", at
    if name in ("frac", "tfrac", "dfrac"):
        top, at = _argument(tokens, at + 1)
        bottom, at = _argument(tokens, at)
        return f"{_grouped(top)}/{_grouped(bottom)}", at
    if name in _SYMBOLS:
        return _SYMBOLS[name], at + 1
    raise _Inexact


def _grouped(text: str) -> str:
    return text if re.fullmatch(r"\w+|√\w+", text.strip()) else f"({text.strip()})"


def _raised(text: str, table: dict[int, int]) -> str:
    bare = text.replace(" ", "")
    if table is _SUPER and bare in ("′", "∘", "°"):
        return "′" if bare == "′" else "°"
    if not all(ord(character) in table for character in bare):
        raise _Inexact
    return bare.translate(table)


# --- in Markdown -------------------------------------------------------------------------------------------


def _inline(state: StateInline, silent: bool) -> bool:
    text, at = state.src, state.pos
    if text[at] not in "\\$":
        return False
    for opening, closing in _DELIMITERS:
        if text.startswith(opening, at):
            end = text.find(closing, at + 2, at + 2 + _MOST_CHARS)
            if end < 0:
                return False
            return _push(state, silent, text[at + 2 : end], end + 2)
    if found := _DOLLARS.match(text, at):
        # Two prices in a line are no formula.
        drawn = to_unicode(found[1])
        if drawn is not None and (re.search(r"[\\^_=]", found[1]) or len(found[1]) == 1):
            return _push(state, silent, found[1], found.end())
    return False


def _push(state: StateInline, silent: bool, tex: str, end: int) -> bool:
    if not silent:
        drawn = to_unicode(tex)
        written = " ".join(state.src[state.pos : end].split())
        state.push("text", "", 0).content = written if drawn is None else drawn
    state.pos = end
    return True


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula on lines of its own. Its lines could be read as a list or a heading."""
    first = state.src[state.bMarks[start] + state.tShift[start] : state.eMarks[start]]
    closing = {"\\[": "\\]", "$$": "$$"}.get(first.rstrip())
    if closing is None or state.is_code_block(start):
        return False
    lines = []
    for line in range(start + 1, end):
        text = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]
        if text.strip().rstrip(".,") == closing:
            break
        lines.append(text)
    else:
        return False
    if silent:
        return True
    state.line = line + 1
    token = state.push("paragraph_open", "p", 1)
    token.map = [start, state.line]
    inline = state.push("inline", "", 0)
    inline.content = first.rstrip() + " ".join(lines) + closing
    inline.map, inline.children = [start, state.line], []
    state.push("paragraph_close", "p", -1)
    return True


def add_formulas(markdown: MarkdownIt) -> None:
    markdown.inline.ruler.before("escape", "formula", _inline)
    markdown.block.ruler.before("fence", "formula", _block, {"alt": ["paragraph", "reference", "blockquote"]})
