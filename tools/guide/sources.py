"""Facts from the program's own tables: keys, options, commands, exit codes, settings, quantization types.

Names, values and defaults are read from the tables that make the help. Most sentences around them are an `answer` in
knowledge/; where there is none, the help's own words serve. The guide's file holds what it was trained to say
(`snapshot`), and a test compares this with the current tables.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple

from app.chat import settings
from app.chat.commands import ENGINE_OPTIONS, SETTABLE, commands
from app.chat.tool_use import MOST_CALLS
from app.cli import options
from app.main import COMMANDS
from app.screens.actions import ACTIONS, OTHER_KEYS, PANE_KEYS, key_label
from engine.catalog import names
from engine.errors import EXIT_CODES, OrinError
from engine.formats import picture_kind
from engine.formats.picture_process import MAX_PIXELS
from engine.formats.quantization import QUANTIZED, Format
from presets import loader
from widgets.labels import LABELS


class Source(NamedTuple):
    """A fact about the program: its `answer`, texts that the answer `must` contain, and `slots` with its names."""

    subject: str
    aspect: str
    answer: str
    must: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]


def _lower(sentence: str) -> str:
    """In lower case at the start, unless the first word is in capitals, or a letter that is a name."""
    keeps = sentence[1:2].isupper() or (sentence[1:2] == " " and sentence[0] != "A")
    return sentence if keeps else sentence[:1].lower() + sentence[1:]


def _said(phrase: Mapping[str, str], otherwise: str, **names: str) -> str:
    """The `answer` of a table with the program's `names`, such as {key}; `otherwise` where nobody wrote one."""
    return phrase["answer"].format(**names) if "answer" in phrase else otherwise


_FAMILY = re.compile(r"[a-z]+(?:-[a-z]{3,}\b)*")  # of a model name: without its number and size
IN_LINE_MODE = " In the line mode, type "
"""Before the command that does the same as a key, at the end of an answer."""

# --- keys ----------------------------------------------------------------------------------------------

EDITING_KEYS = ("Ctrl+Z", "Ctrl+Y", "Ctrl+W", "Ctrl+U", "Ctrl+K", "Ctrl+A", "Ctrl+E", "Ctrl+D", "Ctrl+X")
"""Keys that Textual's text box handles."""
EDITING = (
    "The prompt is edited as in other text boxes: Ctrl+Z undoes and Ctrl+Y redoes, Ctrl+W deletes a word, Ctrl+U to "
    "the start and Ctrl+K to the end of the line; Ctrl+A and Ctrl+E go there."
)
OF_TERMINALS = ("Ctrl+H", "Ctrl+I", "Ctrl+M", "Ctrl+V")
"""Keys that terminals send as Backspace, Tab or Enter, or use to paste."""
COMMON_LABELS = {"tokens", "attention", "memory", "temperature", "power", "sum", "best", "copy", "reading", "other",
                 "role", "calls", "%", "GB/s", "tok/s", "prefill", "sampling", "BEAM", "never", "cached"}  # fmt: skip
"""Labels that are words of other subjects, too: only with their place they are asked for."""
OTHER_FREE_KEYS = ("Insert", "Pause", "Scroll Lock", "Print Screen", "F13", "F14", "F15", "F16", "F20")


def keys(phrases: dict[str, dict[str, str]]) -> Iterator[Source]:
    """What each key does. `phrases` is keys.toml, which also names the command of the line mode that does the same."""
    known = figures()
    for action in ACTIONS:
        label = key_label(action.key)
        phrase = phrases.get(action.name, {})
        plain = phrase.get("line_mode") or (
            f"{IN_LINE_MODE}/{phrase['command']}." if "command" in phrase else ""
        )
        answer = _said(phrase, f"Press {label}: {_lower(action.help)}.", key=label, **known) + plain
        yield Source(f"key.{action.name}", "press", answer, (label,), {"key": _key_names(label)})
        if action.second:
            second = key_label(action.second)
            same = f"{second} does the same as {label}. {answer}"
            advice = f"Many terminals send something else for {second}."
            slots = {"key": _key_names(second)}
            yield Source(f"key.{action.second}", "press", f"{same} {advice}", (label,), slots)
    for label, help in OTHER_KEYS:
        name = label.split(", ")[0].lower()
        begin = "With the mouse" if name == "mouse" else f"Press {label.replace(', ', ' or ')}"
        must = "copies" if name == "mouse" else label.split(", ")[0]
        names = tuple(key for part in label.split(", ") for key in _key_names(part))
        answer = _said(phrases.get(name, {}), f"{begin}: {_lower(help)}.")
        yield Source(f"key.{name}", "press", answer, (must,), {"key": names})
    for place, help in PANE_KEYS:
        parts = help.partition(";")[0].split(", ")
        where = place[:1].lower() + place[1:]
        names = tuple(f"{form} {where}" for part in parts for form in _key_names(part.split()[0]))
        name = where.removeprefix("in the ")
        yield Source(f"key.{name}", "press", f"{place}: {help}.", tuple(parts), {"key": names})
    names = tuple(key for label in EDITING_KEYS for key in _key_names(label))
    yield Source("key.editing", "press", EDITING, ("Ctrl+Z undoes",), {"key": names})
    nothing = f"That key does nothing in orin-chat; {known['key_help']} lists all keys."
    for label in free_keys():
        yield Source(f"key.{label.lower()}", "press", nothing, ("nothing",), {"key": _key_names(label)})
    forms = ("Alt+", "alt-", "alt ", "ctrl+alt+", "Ctrl-Alt-")
    letters = [letter for letter in ascii_lowercase if f"Alt+{letter.upper()}" not in _used()]
    alt = tuple(f"{form}{letter}" for letter in letters for form in forms)
    others = (*OTHER_FREE_KEYS, *(f"the {name.lower()} key" for name in OTHER_FREE_KEYS), *alt)
    yield Source("key.none", "press", nothing, ("nothing",), {"key": others})


def free_keys() -> tuple[str, ...]:
    """Keys that somebody may try but that do nothing: neither an action nor the text box uses them."""
    used = _used() | set(EDITING_KEYS) | set(OF_TERMINALS)
    keys = [*(f"F{n}" for n in range(1, 13)), *(f"Ctrl+{letter}" for letter in ascii_uppercase)]
    return tuple(key for key in keys if key not in used)


def _used() -> set[str]:
    """The keys that do something, besides those that edit the prompt."""
    others = {part for label, _ in OTHER_KEYS for part in label.split(", ")}
    return {key_label(key) for action in ACTIONS for key in action.keys.split(",")} | others


def _key_names(label: str) -> tuple[str, ...]:
    """Ctrl+R -> Ctrl+R, ctrl-r, ^R, control r; Esc -> Esc, escape, the escape key."""
    low = label.lower()
    if low.startswith("ctrl+") and len(low) == 6:
        k = low[5:]
        return (label, low, f"ctrl-{k}", f"ctrl {k}", f"control {k}", f"^{k.upper()}", f"control+{k}", label)
    if low.startswith("alt+") and len(low) == 5:
        return (label, low, f"alt-{low[4:]}", f"alt {low[4:]}", f"the {low} key", f"alt and {low[4:]}", label)
    names = (label, low, f"the {low} key", low.replace("+", " "))
    word = {"esc": "escape", "enter": "return", "up": "arrow up"}.get(low)
    return (*names, word, f"{word} key") if word else names


# --- the command line ----------------------------------------------------------------------------------


def command_line(phrases: Mapping[str, Mapping[str, str]]) -> Iterator[Source]:
    """What each option does, the key that does the same in the chat, and its default if the help names one. `phrases`
    is options.toml, which names the key's action."""
    labels, known = {action.name: key_label(action.key) for action in ACTIONS}, figures()
    optional = {name for name in settings.Settings.__struct_fields__ if name != "sampling"}
    sampling = set(settings.SamplingSettings.__struct_fields__)
    for action in options._parser({})._actions:
        if not action.option_strings or action.dest == "help":
            continue
        name, value = action.option_strings[0], action.metavar or ""
        if action.choices:
            value = "|".join(map(str, action.choices))
        meaning, default = _default(action.help or "")
        usage = f"{name} {value}".strip()
        slots = {"option": (name, name, name.lstrip("-"), f"the {name} option", usage)}
        key = labels.get(phrases.get(action.dest, {}).get("key", ""))
        begin = f"Press {key} in the chat, or use" if key else "Use"
        sentence = f"{begin} {usage}: {meaning}." + (f" The default is {default}." if default else "")
        named = known | {"key": key or "", "option": name, "default": default}
        sentence = _said(phrases.get(action.dest, {}), sentence, **named)
        if action.dest in sampling:
            sentence += f" settings.toml has it as {action.dest} under [sampling]."
        elif action.dest in optional:
            sentence += f" settings.toml has it as {action.dest}."
        yield Source(action.dest, "set", sentence, (name, *([key] if key else [])), slots)
        if default:
            yield Source(action.dest, "default", f"The default of {name} is {default}.", (default,), {})
        if action.dest in (*SETTABLE, *ENGINE_OPTIONS):
            takes = (
                "the engine starts again with it"
                if action.dest in ENGINE_OPTIONS
                else "it holds from the next prompt on"
            )
            live = f"Type /set {action.dest} VALUE in the prompt, and {takes}. At a start it is {name}."
            yield Source(action.dest, "live", live, (f"/set {action.dest}",), {})


def figures() -> dict[str, str]:
    """Texts that other answers insert: {key_stop} and the like, {bits_Q4_K} and the like, {settings_keys}, {types} of
    weights, which pictures are read, and the most calls of tools."""
    tables = ("sampling", "models")
    return {
        **{f"key_{action.name}": key_label(action.key) for action in ACTIONS},
        **{f"bits_{kind.name}": _bits(kind) for kind in QUANTIZED.values()},
        "settings_keys": ", ".join(k for k in settings.Settings.__struct_fields__ if k not in tables),
        "types": ", ".join((*PLAIN, *sorted(kind.name for kind in QUANTIZED.values()))),
        "most_calls": f"{MOST_CALLS}",
        "picture_kinds": " and ".join(", ".join(picture_kind.READ.values()).rsplit(", ", 1)),
        "picture_mib": f"{picture_kind.MAX_BYTES >> 20}",
        "picture_megapixels": f"{MAX_PIXELS / 1e6:.0f}",
    }


PLAIN = {"F32": 32, "F16": 16, "BF16": 16}
"""Types of weights that are not quantized, and their bits."""


def _bits(kind: Format) -> str:
    """Bits a weight, with the scales."""
    return f"{kind.block_bytes * 8 / kind.block:g}"


def _default(help: str) -> tuple[str, str]:
    """The help of an option, split into its text and its default: a number in brackets at the end, or ""."""
    match = re.search(r" \(([\d.]+)\)$", help)
    return (help[: match.start()], match[1]) if match else (help, "")


def exit_codes() -> Iterator[Source]:
    """What each exit code in the help means, with the docstring of its error class."""
    kinds = [kind for kind in OrinError.__subclasses__() if kind.__module__ == OrinError.__module__]
    errors = {EXIT_CODES[kind.kind]: kind for kind in reversed(kinds)}  # the first class with a code wins
    listed = options.EPILOG.partition("exit codes:")[2]
    for code, short in re.findall(r"(\d+) ([a-z][a-z, ]*?)(?: {2,}|\n)", listed):
        kind = errors.get(int(code))
        sentence = (kind.__doc__ or "").split("\n")[0] if kind else ""
        answer = f"Exit code {code} means {short}" + (f": {_lower(sentence)}" if sentence else ".")
        yield Source(f"exit.{code}", "exit", answer, (short,), {"code": (code,)})


def slash_commands(phrases: Mapping[str, Mapping[str, str]]) -> Iterator[Source]:
    """Each command that begins with "/". `phrases` is commands.toml."""
    for name, help in commands().items():
        first, colon, rest = help.partition(": ")
        takes = first if colon and re.fullmatch(r"[\[\]A-Z |]+|\[[a-z]+\]|[a-z]+(\|[a-z]+)+", first) else ""
        meaning = rest if takes else help
        typed = f"/{name}{' ' + takes if takes else ''}"
        answer = _said(phrases.get(name, {}), f"Type {typed} in the prompt: {meaning}.", command=typed)
        slots = {"command": (f"/{name}", f"/{name}", f"the /{name} command")}
        yield Source(f"command.{name}", "command", answer, (f"/{name}",), slots)
    names = ", ".join(f"/{name}" for name in commands())
    yield Source(
        "command.list",
        "list",
        f"The commands in the prompt and in the line mode are {names}.",
        ("/help",),
        {},
    )
    none = "There is no command for that; /help lists all commands."
    yield Source("command.none", "none", none, ("/help",), {})


# --- data ----------------------------------------------------------------------------------------------


def formats(notes: dict[str, dict[str, str]]) -> Iterator[Source]:
    """The quantization types with their bits a weight; `notes` holds a sentence to add to each."""
    by_name = {kind.name: kind for kind in QUANTIZED.values()}
    for name, more in notes.items():
        if name in PLAIN:
            must = str(PLAIN[name])
            sentence = f"{name} stores each weight as a floating-point number of {must} bits."
        else:
            kind = by_name[name]
            must = f"{_bits(kind)} bits"
            sentence = f"{name} takes {must} a weight: {kind.block} weights in {kind.block_bytes} bytes."
        yield Source(f"types.{name}", "what", f"{sentence} {more['note']}", (must,), {})


def preset_files() -> Iterator[Source]:
    """The built-in presets."""
    known = {path.stem: loader.read(path) for path in sorted(loader.BUILT_IN.glob("*.toml"))}
    listed, key = ", ".join(known), figures()["key_presets"]
    sentence = f"A preset is a named set of engine options, chosen with --preset NAME. Built in are {listed}."
    yield Source("preset", "what", sentence, tuple(known), {})
    for name, preset in known.items():
        answer = (
            f"The preset {name} is this: {preset.title}. Choose it with {key}, or start with --preset {name}."
        )
        slots = {"name": (f"preset {name}", f"the preset {name}", f"the {name} preset", f"--preset {name}")}
        yield Source(f"preset.{name}", "what", answer, (preset.title,), slots)


def catalog() -> Iterator[Source]:
    """The models with a known name that chat."""
    found = (_FAMILY.match(model.name) for model in names.known_models() if model.chats)
    families = dict.fromkeys(name[0] for name in found if name)
    known = f"Models known by name are qwen3:0.6b and others of {', '.join(families)}."
    sentence = f"{known} {figures()['key_models']}, or orin-chat models, lists all."
    yield Source("models", "names", sentence, ("qwen3:0.6b",), {})


def programs(phrases: Mapping[str, Mapping[str, str]]) -> Iterator[Source]:
    """The commands other than the chat: orin-chat COMMAND. `phrases` is programs.toml."""
    for name, (_, meaning) in COMMANDS.items():
        called = f"orin-chat {name}"
        slots = {"option": (called, called, f"the command {name}", f"the {name} command")}
        answer = _said(phrases.get(name, {}), f"{called}: {meaning}.", command=called)
        yield Source(f"program.{name}", "program", answer, (called,), slots)
    listed = f"Beside the chat there are these commands: {', '.join(COMMANDS)}. Each has its own --help."
    yield Source("program", "list", listed, tuple(COMMANDS), {})


def labels() -> Iterator[Source]:
    """What the labels of the dashboard and of the status line mean, as their tooltips say it."""
    for pane, table in LABELS.items():
        for label, sentence in table.items():
            place = f"in the {pane}" if pane in ("throughput", "kernels", "machine") else f"on the {pane}"
            said = f"{'O' if pane == 'status line' else 'I'}n the {pane}{'' if pane == 'status line' else ' pane'}, "
            quoted = (f"{label} {place}", f"the label {label}", f"{label} on the screen", f"the word {label}")
            names = quoted if label in COMMON_LABELS else (label, *quoted)
            slug = re.sub(r"\W+", "-", label.lower()).strip("-") or "percent"
            # "P marks where"
            marks = sentence.partition(" ")[0] == label.partition(" ")[0] and label[1:2] == " "
            answer = said + (sentence if marks else f"{label} means {_lower(sentence)}")
            yield Source(
                f"label.{pane.replace(' ', '-')}-{slug}", "what", answer, (_lower(sentence),), {"name": names}
            )


def all_sources(knowledge: Path) -> list[Source]:
    """Every fact about the program. `knowledge` is the folder of the TOML files."""
    read = {
        name: tomllib.loads((knowledge / f"{name}.toml").read_text("utf-8"))
        for name in ("keys", "options", "quantization", "commands", "programs")
    }
    return [
        *keys(read["keys"]),
        *command_line(read["options"]),
        *exit_codes(),
        *slash_commands(read["commands"]),
        *formats(read["quantization"]["types"]),
        *preset_files(),
        *catalog(),
        *programs(read["programs"]),
        *labels(),
    ]


def snapshot(sources: list[Source]) -> dict[str, tuple[str, ...]]:
    """The texts that the guide must say for each fact, by fact id. They are in its file, and a test compares them."""
    return {f"{source.subject}.{source.aspect}": source.must for source in sources}
