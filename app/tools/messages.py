"""What the program and the process of its MCP servers (`host`) tell each other, as lines of JSON."""

from __future__ import annotations

import re

import msgspec

SERVER_NAME = re.compile(r"[a-z0-9_-]{1,32}")
LINE_BYTES = 32 << 20
"""The host writes no longer line."""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server of settings.toml, in the table [mcp.NAME]: a `command` that speaks on its standard streams, a program or
    a list with its arguments, or a `url`. `env` is added to the few variables that it gets. `folder` is where it runs
    ("": where the chat does). A call may take `timeout_s`."""

    command: str | tuple[str, ...] = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    folder: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("A server needs a command or a url, not both")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError("The url of a server begins with http:// or https://")
        if not 0 < self.timeout_s <= 3600:
            raise ValueError("timeout_s is between 0 and 3600")

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments."""
        command = (self.command,) if isinstance(self.command, str) else self.command
        return (*command, *self.args)


class ListedTool(msgspec.Struct, frozen=True, kw_only=True):
    """As the server describes it. `schema` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    schema: str = ""


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag=True): ...


class Start(_Line, frozen=True, kw_only=True):
    servers: dict[str, Server]


class Call(_Line, frozen=True, kw_only=True):
    """`arguments` is a JSON object."""

    id: int
    server: str
    tool: str
    arguments: str


class Cancel(_Line, frozen=True, kw_only=True):
    id: int


class Listed(_Line, frozen=True, kw_only=True):
    """A server runs and has these tools. `note` says which ones are left out."""

    server: str
    tools: tuple[ListedTool, ...]
    note: str = ""


class Down(_Line, frozen=True, kw_only=True):
    """A server did not start, or has ended. `problem` goes on after its name: "ended: exit status 1"."""

    server: str
    problem: str


class Result(_Line, frozen=True, kw_only=True):
    """What a call returned. `chars` counts the whole text, of which `text` may be the beginning."""

    id: int
    text: str
    is_error: bool = False
    chars: int = 0


Command = Start | Call | Cancel
Event = Listed | Down | Result
encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(Command).decode
decode_event = msgspec.json.Decoder(Event).decode
