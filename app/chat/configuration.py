"""What an engine is started with, and which sampling holds: merged from all that can say so.

Each of these overrides those above it, one option at a time:

1. the defaults of `EngineOptions` and `Sampling`
2. the sampling that the model's file suggests
3. settings.toml
4. a preset: of --preset, else of settings.toml (which gives way to --backend)
5. the command line
6. a preset that is chosen in the chat, in place of 4
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.structs import asdict, replace

from app.chat.settings import Settings, check_sampling
from engine.catalog.encoders import encoder_beside
from engine.errors import UsageError
from engine.formats.suggested_sampling import suggested_sampling
from engine.protocol.events import EngineOptions, Matvec, Ready, Sampling
from presets.loader import Preset
from presets.sampling import out_of_range
from widgets.text import one_line


class Configuration(NamedTuple):
    engine: EngineOptions
    sampling: Sampling
    keep_warm_s: float = 0.0
    """For how long the engine lives on when the program ends, for the next run."""
    chosen: Mapping[str, Any] = {}
    """What of the sampling was chosen; the rest is the model's."""

    def with_model(
        self, path: Path, mmproj: str | None = None, draft: Path | None = None, lora: str = ""
    ) -> Self:
        """`mmproj`: see `encoder_of`. `draft`: the file of a draft model. `lora`: its adapters."""
        beside = {"mmproj": encoder_of(path, mmproj), "draft": str(draft or ""), "lora": lora}
        engine = replace(self.engine, model_path=str(path), **beside)
        return self._replace(engine=engine, sampling=self.sampling_of(path))

    def sampling_of(self, path: Path) -> Sampling:
        """How tokens of a model are drawn."""
        return replace(suggested(path), **self.chosen)


def configure(
    model_path: str,
    settings: Settings = Settings(),  # noqa: B008 (immutable)
    preset: Preset | None = None,
    command_line: Mapping[str, Any] = {},
    *,
    chosen_in_chat: bool = False,
) -> Configuration:
    """Merges what is asked for. `command_line` maps names of fields of `EngineOptions` and `Sampling` to values, None
    where an option was not given. `chosen_in_chat`: `preset` overrides the command line, too.

    Raises UsageError for sampling out of its range."""
    from_settings = {
        "backend": settings.backend,
        "context_length": settings.context,
        "kv": settings.kv and settings.kv.value,
        "speculate": settings.speculate,
        "keep_packed": settings.keep_packed,
        **asdict(settings.sampling),
    }
    from_preset = _fields(preset) if preset else {}
    prefix_gb = settings.prefix_cache_gb
    later = (command_line, from_preset) if chosen_in_chat else (from_preset, command_line)
    merged: dict[str, Any] = {"prefix_cache_bytes": None if prefix_gb is None else int(prefix_gb * 1e9)}
    for source in (from_settings, *later):
        merged |= {name: value for name, value in source.items() if value is not None}
    # What the command line says is for this model, and what settings and presets say for all.
    merged["context_at_most"] = merged.get("context_length") != command_line.get("context_length")
    engine, chosen = (
        {name: merged[name] for name in kind.__struct_fields__ if name in merged}
        for kind in (EngineOptions, Sampling)
    )
    check_sampling(sampling := replace(suggested(Path(model_path)), **chosen))
    return Configuration(EngineOptions(model_path=model_path, **engine), sampling, chosen=chosen)


def suggested(path: Path) -> Sampling:
    """`Sampling` as the file of a model suggests it, unless that is out of range."""
    of_file = suggested_sampling(path)
    with suppress(msgspec.ValidationError):
        sampling = msgspec.convert(of_file, Sampling, strict=False)
        if not out_of_range(sampling):
            return sampling
    return Sampling()


def sampling_with_other_model(sampling: Sampling, old: Path, new: Path) -> Sampling:
    """The sampling for another model: what is as the old file suggests becomes what the new one suggests."""
    before, after = suggested(old), suggested(new)
    same = (name for name, value in asdict(before).items() if getattr(sampling, name) == value)
    return replace(sampling, **{name: getattr(after, name) for name in same})


def encoder_of(model: Path, asked: str | None = None) -> str:
    """The file of the encoder with which a model sees: the one that is `asked` for ("off": none), else the one beside
    the model. "" if there is none. Raises UsageError if there is no such file."""
    if asked is None:
        return str(encoder_beside(model) or "")
    if asked != "off" and not Path(asked).expanduser().is_file():
        raise UsageError(
            f"There is no file {one_line(asked)}.", "Give the path of the encoder: --mmproj FILE."
        )
    return "" if asked == "off" else str(Path(asked).expanduser())


def adapters_option(engine: EngineOptions) -> str:
    """The option that names the adapters of an engine, and a space; "" if there are none."""
    files = ",".join(name.removesuffix(":1") for name in engine.lora.split(","))
    return f"--lora {quote(files)} " if files else ""


def missed_adapters(chat_model: str, ready: Ready) -> str:
    """A sentence for a chat that began with `chat_model`, if that is the model that is ready, with adapters that it
    lacks now; else ""."""
    if chat_model == ready.model.title or not chat_model.startswith(f"{ready.model.name} + "):
        return ""
    return f"This chat began with {one_line(chat_model)}: --lora FILE names its adapters."


def without_effect(sampling: Sampling, ready: Ready) -> tuple[str, ...]:
    """Sentences about options that were chosen and that the model does not heed."""
    sentences = []
    if sampling.effort and not ready.model.takes_effort:
        sentences.append(f"The chat template of {ready.model.name} reads no effort: it has no effect.")
    if chosen := [name for name in ready.unheeded if getattr(sampling, name) != getattr(Sampling(), name)]:
        sentences.append(f"Without effect, as the server's protocol lacks it: {', '.join(chosen)}.")
    return tuple(sentences)


def with_other_model(options: EngineOptions, path: Path) -> EngineOptions:
    """The options for another model file, whose context is at most as long as it was trained for. If it is the same
    file, all stays."""
    if str(path) == options.model_path:
        return options
    beside = {"mmproj": encoder_of(path), "draft": "", "lora": ""}
    return replace(options, model_path=str(path), context_at_most=True, **beside)


def with_changes(options: EngineOptions, **changed: Any) -> EngineOptions:
    """`options`, of which a user changes some by hand."""
    if "context_length" in changed:
        changed["context_at_most"] = False
    return replace(options, **changed)


def _fields(preset: Preset) -> dict[str, Any]:
    """What `preset` says, under the names of `EngineOptions` and `Sampling`; None leaves an option open."""
    return {
        "backend": preset.backend,
        "kernels": preset.kernels,
        "search_width": preset.search_width,
        "context_length": preset.context,
        "kv": preset.kv and preset.kv.value,
        "speculate": preset.speculate,
        "matvec": None if preset.matvec is None else Matvec(**asdict(preset.matvec)),
        **asdict(preset.sampling),
    }


def remarks_on(ready: Ready, sampling: Sampling) -> tuple[str, ...]:
    """Sentences on what is unexpected in an engine, or has no effect there."""
    return *ready.warnings, *without_effect(sampling, ready)
