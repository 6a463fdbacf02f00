"""Failures that a user can act on. Each carries one sentence on what is wrong and one on what to do."""


class OrinError(Exception):
    """Base of all expected failures. `message` says what is wrong, `hint` what to do about it (may be empty).

    `exit_code` is what the command line returns when the failure ends it; the README lists the codes.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(OrinError):
    """The request itself is wrong: options that exclude each other, an unknown backend."""

    exit_code = 2


class ModelFileError(OrinError):
    """The model file is missing, damaged, or of a kind that the engine does not run."""

    exit_code = 3


class BackendError(OrinError):
    """The device, its driver or its compiler does not work, or the engine process died."""

    exit_code = 4


class ContextFullError(OrinError):
    """The prompt, or the prompt and the reply, do not fit into the context."""

    exit_code = 5


class TemplateError(OrinError):
    """The model's chat template does not render."""

    exit_code = 3


class GaveWayError(OrinError):
    """Work for the idle engine was given up, since something more urgent came up."""
