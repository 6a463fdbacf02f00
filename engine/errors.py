"""Failures that a user can act on. Each carries one sentence on what is wrong and one on what to do."""

import contextlib
import errno
import sys
import traceback
from typing import ClassVar, Literal

FailureKind = Literal["usage", "model", "template", "backend", "context", "internal"]
# What the command line returns when a failure ends it; `orin-chat --help` and the docs list the same codes.
EXIT_CODES: dict[FailureKind, int] = {
    "internal": 1, "usage": 2, "model": 3, "template": 3, "backend": 4, "context": 5,
}  # fmt: skip
LOG_IS = "The engine's log:"
"""Before the path, at the end of a hint."""


class OrinError(Exception):
    """Base of all expected failures. `message` says what is wrong, `hint` what to do about it (may be empty)."""

    kind: ClassVar[FailureKind] = "internal"
    ends_engine: ClassVar[bool] = False
    """Whether the process in which it happened can compute nothing more."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.kind]


class UsageError(OrinError):
    """The request itself is wrong: options that exclude each other, an unknown backend."""

    kind = "usage"


class PictureError(OrinError):
    """A picture is not read: its file is damaged, too large, or of a kind that is not known."""

    kind = "usage"


class ModelFileError(OrinError):
    """The model file is missing, damaged, or of a kind that the engine does not run."""

    kind = "model"


class BackendError(OrinError):
    """The device, its driver or its compiler does not work, or the engine process died."""

    kind = "backend"


class CompilerHangsError(BackendError):
    """A compiler did not end. Another try would take as long."""


class DeviceHangsError(BackendError):
    """What a device computes, or a call of its driver, does not end."""

    ends_engine = True

    def __init__(self) -> None:
        super().__init__(
            "The GPU does not end its work: a kernel or the driver hangs.",
            "Send the prompt again: another process answers it. If that hangs too, restart the machine.",
        )


SHORTEN = "Shorten the prompt, start a new chat, or restart with a larger --context."
"""The hint of a `ContextFullError`."""
SHORTEN_AT_MOST = (
    "Shorten the prompt, start a new chat, or take a model with a longer context: this one has no more."
)
"""The same for a context as long as the model was trained for."""


class ContextFullError(OrinError):
    """The prompt, or the prompt and the reply, do not fit into the context.

    It has `tokens` (or at least so many, where counting them all would take long), and the context holds `most` of
    them. 0: not known."""

    kind = "context"

    def __init__(self, message: str, hint: str = "", *, tokens: int = 0, most: int = 0) -> None:
        super().__init__(message, hint)
        self.tokens, self.most = tokens, most


class TemplateError(OrinError):
    """The model's chat template does not render, or refuses a conversation."""

    kind = "template"


class PreemptedError(OrinError):
    """The engine stopped background work, such as a profile, because a request came in."""

    kind = "usage"


def print_without_messages(error: BaseException | None) -> None:
    """Prints the traceback and the type of each error in the chain to the log, not its message, which may quote the
    prompt."""
    with contextlib.suppress(OSError):  # the disk is full
        while error is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))
            print(frames, type(error).__name__, file=sys.stderr, sep="")
            error = error.__cause__ or error.__context__


def described(error: Exception) -> tuple[FailureKind, str, str]:
    """Kind, message and hint of any error."""
    if isinstance(error, OrinError):
        return error.kind, error.message, error.hint
    if isinstance(error, MemoryError) or "out of memory" in str(error):  # as CUDA's driver says it
        hint = "Choose a smaller model or a shorter context."
        return "backend", "There is not enough memory for this model and context.", hint
    text = str(error).rstrip(".")
    if text.startswith("Wait timeout"):  # as tinygrad's NV says it
        return described(DeviceHangsError())
    if text.startswith("CUDA Error"):
        hint = "Send the prompt again: another process answers it. If that fails too, dmesg may say why."
        return "backend", f"The GPU failed: {text}.", hint
    what = f"{type(error).__name__}: {text}".removesuffix(": ")
    return "internal", f"The engine failed: {what}.", ""


def start_hint(error: OSError) -> str:
    """What to do if the system does not start a program."""
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        return "Free some memory, or end other programs, and try again."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Too many files are open: allow more of them (ulimit -n), or end other programs."
    what = error.filename if isinstance(error.filename, str) else sys.executable
    return f"See whether {one_line(what)} is there and may be used, or install orin-chat again."


def one_line(text: str, limit: int = 200) -> str:
    """`text` as part of a sentence: one line of at most `limit` characters, all of them printable.

    For text that comes from a file, a server or an exception. Lone surrogates become U+FFFD, so that the result
    can be encoded as UTF-8; control characters are left out."""
    words = " ".join(text[: 4 * limit].split())
    line = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c if c.isprintable() else "" for c in words)
    return line if len(line) <= limit else line[: limit - 1] + "…"
