"""Signs in what somebody types that do not change what it asks: emoji, flags, a typographer's quotation marks, accents.

The guide has a token for each byte of most of them, so it has to see many to learn that they mean nothing.
"""

import random
import re
import unicodedata

_USUAL = (
    *(
        "😀",
        "🙂",
        "😂",
        "😅",
        "😉",
        "😊",
        "😍",
        "🤔",
        "🙄",
        "😢",
        "😭",
        "😡",
        "🤯",
        "🤖",
        "👍",
        "👎",
        "👋",
        "🙏",
        "👀",
        "💪",
    ),
    *("🔥", "🚀", "💡", "💻", "🛑", "❓", "❗", "✅", "❌", "⚡", "✨", "🎉", "❤️", "♥", "☕", "⭐", "→", "…"),
    *(":)", ":-)", ";-)", ":(", ":D", "xD", "^^", "<3"),
)
_RANGES = ((0x1F300, 0x1F650), (0x1F680, 0x1F6FD), (0x1F900, 0x1FA00), (0x1FA70, 0x1FAF0), (0x2600, 0x27C0))
_FLAG, _SKIN, _JOINER, _PICTURE = 0x1F1E6, 0x1F3FB, "\u200d", "\ufe0f"
_MARKS = ("\u0301", "\u0300", "\u0302", "\u0308", "\u0303", "\u030a", "\u030c", "\u0327")
_ALONE = tuple("éèêñüöäßçåøæœłžšı¿¡€£°§·–—«»„’。、？！")
_DRESSED = (
    ("'", "’"),
    ("'", "‘"),
    ("...", "…"),
    ("-", "–"),
    (" - ", " — "),
    ('"', "”"),
    ("?", "？"),
    ("!", "！"),
)


def emoji(rng: random.Random) -> str:
    """An emoji or a flag, sometimes one of several characters."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_USUAL)
    if kind < 0.65:
        return "".join(chr(_FLAG + rng.randrange(26)) for _ in range(2))
    one = chr(rng.randrange(*rng.choice(_RANGES)))
    if kind < 0.72:
        return one + chr(_SKIN + rng.randrange(5))
    if kind < 0.78:
        return one + _JOINER + chr(rng.randrange(*_RANGES[0]))
    return one + _PICTURE if kind < 0.85 else one


def accented(text: str, rng: random.Random) -> str:
    """`text` with an accent on one of its letters, if one takes it."""
    places = [match.start() for match in re.finditer("[A-Za-z]", text)]
    rng.shuffle(places)
    for at in places:
        letter = unicodedata.normalize("NFC", text[at] + rng.choice(_MARKS))
        if len(letter) == 1:
            return text[:at] + letter + text[at + 1 :]
    return text


def signed(text: str, rng: random.Random) -> str:
    """`text` with signs before, behind or between its words, or in place of others."""
    kind = rng.random()
    if kind < 0.12:
        return accented(text, rng)
    if kind < 0.27:
        dressed = text
        for plain, sign in rng.sample(_DRESSED, 4):
            dressed = dressed.replace(plain, sign)
        left, right = rng.choice(("“”", "«»", "„“", "‘’", "「」"))
        return dressed if dressed != text else f"{left}{text}{right}"
    signs = [emoji(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if kind < 0.4:
        signs = [rng.choice(_ALONE), *signs[1:]]
    added = rng.choice(("", "", " ")).join(signs)
    if rng.random() < 0.15:
        added += rng.choice((" ", "")) + rng.choice(_ALONE)
    where, gap = rng.random(), rng.choice((" ", " ", ""))
    if added[0].isascii() or added[-1].isascii():  # ":D" at the end of a name would be part of it
        gap = " "
    if where < 0.6:
        return text + gap + added
    if where < 0.85:
        return added + gap + text
    words = text.split(" ")
    words.insert(rng.randrange(len(words) + 1), added)
    return " ".join(words)
