"""What is meant by words of the command line that orin-chat does not have: misspelled ones, and those of llama.cpp,
vLLM and Ollama."""

import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.errors import UsageError
from engine.system.invocation import call
from presets import GUIDE

_OPTIONS = {
    "--model": ("-m", "-hf", "--hf-repo", "--model-path"),
    "--context": ("-c", "--ctx-size", "--num-ctx", "--n-ctx", "--max-model-len", "--context-length"),
    "--max-tokens": ("-n", "--n-predict", "--predict", "--num-predict", "--max-new-tokens"),
    "--temperature": ("--temp",),
    "--repeat-penalty": ("--repetition-penalty",),
    "--backend": ("-ngl", "--n-gpu-layers", "--gpu-layers", "-dev", "--device", "--gpu", "--cpu"),
    "--kv": ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
    "--draft": ("-md", "--model-draft", "--speculative-model"),
    "--lora": ("--lora-scaled", "--adapter", "--lora-modules"),
    "--system": ("-sys", "--system-prompt"),
    "--image": ("--picture", "--file"),
    "--parallel": ("-np", "--max-num-seqs"),
    "--api-key-env": ("--api-key",),
    "--seed": ("-s",),
    "--verbose": ("-v",),
    "--version": ("-V",),
    "--no-think": ("--think",),
    "--continue": ("--resume",),
}
_WORDS = {
    "chat": "", "help": "--help", "version": "--version", "list": "models", "ls": "models", "run": "--model NAME",
    "server": "serve", "benchmark": "bench", "download": "pull", "remove": "rm", "delete": "rm", "ps": "models",
}  # fmt: skip
_PROMPT = ("-p", "--prompt")
_CORES = ("-t", "--threads")
_MODEL_NAME = re.compile(r"[\w./-]+:[\w.-]+")
_HUB_ADDRESS = re.compile(r"(?:hf\.co|huggingface\.co)(?:/[\w.-]+){2,}(?::[\w.-]+)?")
_MODEL_FILE = re.compile(r"[^\s:]+\.gguf", re.IGNORECASE)


def about_option(word: str, options: Collection[str], words: Collection[object]) -> str:
    """A sentence on an option that is none of the `options` of a command, which takes these `words`; "" if nothing is
    known of it."""
    if word in ("--model", "-m") and "NAME" in words:
        return "The model's name needs no option: it stands alone."
    if word in _PROMPT:
        return "The prompt needs no option: it stands alone, in quotes."
    if word in _CORES:
        return "A CPU's cores are all used."
    word = word.replace("_", "-")
    others = (ours for ours, theirs in _OPTIONS.items() if word in theirs)
    longer = (option for option in options if word.startswith("--") and option.startswith(word))
    bare = {option.lstrip("-"): option for option in options}
    near = difflib.get_close_matches(word[2:], bare, 1) if word.startswith("--") else []
    for option in (word, *others, *longer, *(bare[name] for name in near)):
        if option in options:
            return f"Is {option} meant?"
    return ""


def check_command(arguments: Sequence[str], commands: Collection[str]) -> None:
    """Raises UsageError for a command line that begins with a word which looks like a command and is none of the
    `commands`."""
    word, *others = arguments
    if _MODEL_FILE.fullmatch(word) and not Path(word).exists():
        hint = "" if others else f"As a prompt: {call(f'-- {word}')}."
        raise UsageError(f"There is no file {word}.", hint)
    if word == "help" and len(others) == 1 and others[0] in commands:
        raise UsageError("There is no command help.", f"That is: {call(f'{others[0]} --help')}.")
    if word == "run" and len(others) in (1, 2) and (_MODEL_NAME.fullmatch(others[0]) or others[0] == GUIDE):
        prompt = f" {others[1]!r}" if others[1:] else ""
        raise UsageError("There is no command run.", f"That is: {call(f'--model {others[0]}{prompt}')}.")
    if _WORDS.get(word) in ("pull", "rm") and len(others) == 1 and _MODEL_NAME.fullmatch(others[0]):
        meant = call(f"{_WORDS[word]} {others[0]}")
        raise UsageError(f"There is no command {word}.", f"That is: {meant}.")
    if not others and (_MODEL_NAME.fullmatch(word) or _HUB_ADDRESS.fullmatch(word)):
        from engine.catalog.names import known_models

        if _HUB_ADDRESS.fullmatch(word) or any(model.name == word for model in known_models()):
            hint = f"As a prompt: {call(f'-- {word}')}."
            raise UsageError(f"Is {word} the model? That is: {call(f'--model {word}')}.", hint)
    near = difflib.get_close_matches(word, commands, 1, 0.8) if word.isalpha() else []
    if not others and (word in _WORDS or near):
        command = call(_WORDS.get(word, *near)).strip()
        raise UsageError(f"Is {word} a command? That is: {command}.", f"As a prompt: {call(f'-- {word}')}.")
