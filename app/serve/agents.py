"""How programs of others are set up for the server: their lines of configuration, and the files these belong in."""

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UsageError

NAME = "orin-chat"
NO_KEY = "any"  # for programs that want a key where the server needs none
AGENT_TOKENS = 16_384
"""A context that holds the instructions of most agents, and some turns."""


@dataclass(frozen=True)
class Endpoint:
    """A server at `address` ("http://127.0.0.1:8080") with a model, whose context is in tokens (0: not known).
    `key_env` names the variable with the key; "": none is needed. `has_tools`: the model can call tools.
    `sees`: it takes pictures."""

    address: str
    model: str
    context: int = 0
    key_env: str = ""
    has_tools: bool = True
    sees: bool = False

    @property
    def remarks(self) -> list[str]:
        """What agents need and the model does not have."""
        found = []
        if not self.has_tools:
            found.append(f"The context of {self.model} is too short for tools, and agents need them.")
        if 0 < self.context < AGENT_TOKENS:
            found.append(
                f"A context of {self.context:,} tokens is short for agents: they send prompts of 6,000 to 25,000."
            )
        return found

    @property
    def v1(self) -> str:
        return f"{self.address}/v1"

    @property
    def shell_key(self) -> str:
        return f'"${self.key_env}"' if self.key_env else NO_KEY

    @property
    def shell_model(self) -> str:
        return shlex.quote(self.model)


CLAUDE_WAITS_MS = 3_600_000
"""How long Claude Code waits: its first prompt of 20,000 tokens takes a slow machine longer than its own 300 s."""


@dataclass(frozen=True)
class Agent:
    """`lines` are what belongs in `file` ("": nowhere), and `merged` puts them into its text (None: by hand). `run` is
    how the program is started then."""

    name: str
    title: str
    run: Callable[[Endpoint], str]
    file: str = ""
    lines: Callable[[Endpoint], str] = lambda _: ""
    merged: Callable[[str, Endpoint], str] | None = None


_BY_HAND = "Put the lines into it by hand."


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _json_agent(
    name: str,
    title: str,
    run: Callable[[Endpoint], str],
    file: str,
    value: Callable[[Endpoint], Mapping[str, Any]],
) -> Agent:
    """An agent whose file is a JSON object."""

    def merged(old: str, endpoint: Endpoint) -> str:
        try:
            before = json.loads(old) if old.strip() else {}
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise UsageError(f"{file} is not plain JSON.", _BY_HAND)
        return _as_json(_combined(before, value(endpoint)))

    return Agent(name, title, run, file, lambda endpoint: _as_json(value(endpoint)), merged)


def _combined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(old)
    for key, value in new.items():
        before = made.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _combined(before, value)
        made[key] = value
    return made


def _appended_agent(
    name: str,
    title: str,
    run: Callable[[Endpoint], str],
    file: str,
    lines: Callable[[Endpoint], str],
    mark: str,
) -> Agent:
    """An agent whose file gets a part at its end. `mark` begins that part: a file that has it is left alone."""

    def merged(old: str, endpoint: Endpoint) -> str:
        if any(line.strip() == mark for line in old.splitlines()):
            raise UsageError(f"{file} has a part for {NAME} already.", "Take it out, or change it by hand.")
        made = f"{old.rstrip()}\n\n{lines(endpoint)}" if old.strip() else lines(endpoint)
        if file.endswith(".toml"):
            try:
                tomllib.loads(made)
            except ValueError:
                raise UsageError(f"{file} would not be valid TOML with these lines.", _BY_HAND) from None
        return made

    return Agent(name, title, run, file, lines, merged)


# --- the programs ----------------------------------------------------------------------------------------


def _codex(at: Endpoint) -> str:
    key = f"env_key = {json.dumps(at.key_env)}\n" if at.key_env else ""
    return (
        f"[model_providers.{NAME}]\n"
        f'name = "{NAME}"\n'
        f"base_url = {json.dumps(at.v1)}\n"
        f'wire_api = "responses"\n{key}'
    )


def _run_codex(at: Endpoint) -> str:
    context = f" -c model_context_window={at.context}" if at.context else ""
    return f"codex -c model_provider={NAME} -c model={at.shell_model}{context}"


def _claude(at: Endpoint) -> dict[str, Any]:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    # Signs of life do not count for the second one.
    waits = ("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS")
    variables = {
        "ANTHROPIC_BASE_URL": at.address,
        **dict.fromkeys(names, at.model),
        **dict.fromkeys(waits, str(CLAUDE_WAITS_MS)),
    }
    if not at.key_env:
        variables["ANTHROPIC_AUTH_TOKEN"] = NO_KEY
    return {"env": variables}


def _run_claude(at: Endpoint) -> str:
    return f"ANTHROPIC_AUTH_TOKEN={at.shell_key} claude"


def _opencode(at: Endpoint) -> dict[str, Any]:
    limit = {"limit": {"context": at.context, "output": at.context // 4}} if at.context else {}
    options = {"baseURL": at.v1, "apiKey": f"{{env:{at.key_env}}}" if at.key_env else NO_KEY}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": options,
        "models": {at.model: {"name": at.model, "tool_call": at.has_tools, **limit}},
    }
    return {"provider": {NAME: provider}}


def _zed(at: Endpoint) -> dict[str, Any]:
    can = {"tools": at.has_tools, "images": at.sees, "parallel_tool_calls": True, "prompt_cache_key": False}
    known = {"max_tokens": at.context} if at.context else {}
    model = {"name": at.model, "display_name": at.model, **known, "capabilities": can}
    return {"language_models": {"openai_compatible": {NAME: {"api_url": at.v1, "available_models": [model]}}}}


def _continue(at: Endpoint) -> str:
    key = f"${{{{ secrets.{at.key_env} }}}}" if at.key_env else NO_KEY
    return (
        "name: Local\nversion: 1.0.0\nschema: v1\nmodels:\n"
        f"  - name: {NAME}\n    provider: openai\n    model: {json.dumps(at.model)}\n"
        f"    apiBase: {at.v1}\n    apiKey: {key}\n    roles: [chat, edit, apply]\n"
    )


def _llm(at: Endpoint) -> str:
    key = f"  api_key_name: {NAME}\n" if at.key_env else ""
    vision = "  vision: true\n" if at.sees else ""
    return (
        f"- model_id: {NAME}\n  model_name: {json.dumps(at.model)}\n  api_base: {at.v1}\n"
        f"{key}  supports_tools: {json.dumps(at.has_tools)}\n  supports_schema: true\n{vision}"
    )


AGENTS = {
    agent.name: agent
    for agent in (
        _appended_agent(
            "codex", "Codex CLI", _run_codex, "~/.codex/config.toml", _codex, f"[model_providers.{NAME}]"
        ),
        _json_agent("claude", "Claude Code", _run_claude, ".claude/settings.local.json", _claude),
        _json_agent(
            "opencode",
            "opencode",
            lambda at: f"opencode --model {shlex.quote(f'{NAME}/{at.model}')}",
            "~/.config/opencode/opencode.json",
            _opencode,
        ),
        _json_agent(
            "zed",
            "Zed",
            lambda at: f"ORIN_CHAT_API_KEY={at.shell_key} zed",
            "~/.config/zed/settings.json",
            _zed,
        ),
        Agent(
            "gemini",
            "Gemini CLI",
            lambda at: (
                f"GOOGLE_GEMINI_BASE_URL={at.address} GEMINI_API_KEY={at.shell_key} gemini --model {at.shell_model}"
            ),
        ),
        Agent(
            "qwen",
            "Qwen Code",
            lambda at: (
                f"OPENAI_BASE_URL={at.v1} OPENAI_API_KEY={at.shell_key} OPENAI_MODEL={at.shell_model} qwen"
            ),
        ),
        Agent(
            "cline",
            "Cline's CLI",
            lambda at: (
                f"cline auth -p openai-compatible -b {at.v1} -k {at.shell_key} -m {at.shell_model} && "
                "cline -P openai-compatible"
            ),
        ),
        Agent(
            "openhands",
            "OpenHands",
            lambda at: (
                f"LLM_BASE_URL={at.v1} LLM_API_KEY={at.shell_key} "
                f"LLM_MODEL={shlex.quote(f'openai/{at.model}')} openhands --override-with-envs"
            ),
        ),
        Agent("continue", "Continue", lambda _: "cn", "~/.continue/config.yaml", _continue),
        Agent(
            "aider",
            "aider",
            lambda at: (
                f"OPENAI_API_BASE={at.v1} OPENAI_API_KEY={at.shell_key} "
                f"aider --model {shlex.quote(f'openai/{at.model}')}"
            ),
        ),
        Agent(
            "open-webui",
            "Open WebUI",
            lambda at: f"OPENAI_API_BASE_URL={at.v1} OPENAI_API_KEY={at.shell_key} open-webui serve",
        ),
        _appended_agent(
            "llm",
            "llm",
            lambda at: (
                (f"llm keys set {NAME} --value {at.shell_key} && " if at.key_env else "")
                + f"llm -m {NAME} 'Hello'"
            ),
            "~/.config/io.datasette.llm/extra-openai-models.yaml",
            _llm,
            f"- model_id: {NAME}",
        ),
    )
}
