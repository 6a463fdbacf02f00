"""What an engine does, in words, and a line of a terminal that shows it; for modes without a full screen."""

import shutil
import textwrap
from contextlib import suppress
from typing import TextIO

from engine.protocol.events import (
    Event,
    Finished,
    Loading,
    Prefilling,
    Ready,
    Search,
    Seeing,
    Thinking,
    Warming,
    decode_rate,
    shown_prefill_rate,
)
from widgets.text import as_latency, cache_text, counted, one_line


def describe(event: Event) -> str:
    """What the engine is doing when it sends this event; "" if the event does not say."""
    match event:
        case Loading(done_bytes=done, total_bytes=total):
            share = f"loading {done / total:.0%}" if total else "loading"
            return ", ".join(filter(None, [share, _context(event)]))
        case Warming(search=Search() as search):
            left = f", {search.left_s:.0f} s left" if search.left_s else ""
            return f"searching, {event.done} of {counted(event.total, 'product')} done ({event.cached} known){left}"
        case Warming(done=done, total=total):
            return f"preparing kernels, {done}" + (f" of about {total}" if total else "")
        case Ready(model=model):
            parts = [model.title, model.quantization, f"on {event.backend} ({event.device_name})"]
            parts.append(_context(event))
            parts.append(f"ready in {event.load_ms / 1e3:.1f} s")
            if event.keep_warm_s:
                parts.append(f"stays warm for {event.keep_warm_s / 60:.3g} min after the end")
            return one_line(", ".join(part for part in parts if part))
        case Seeing(done=done, total=total):
            share = f", {done / total:.0%}" if total else ""
            task = "preparing kernels for" if event.compiles else "looking at"
            return f"{task} picture {event.index + 1} of {event.pictures}{share}"
        case Prefilling(done=done, total=total):
            return f"reading the prompt, {done:,} of {counted(total, 'token')}"
        case Thinking():
            return "thinking"
    return ""


def _context(event: Loading | Ready) -> str:
    """context of 40,960 tokens (4.7 GB of KV cache); "" if there are none."""
    cost = f" ({cache_text(event.cache_bytes, event.kv)})" if event.cache_bytes else ""
    return f"context of {counted(event.context_length, 'token')}{cost}" if event.context_length else ""


def guessed(end: Finished) -> str:
    """What guesses of next tokens were worth; there were some."""
    gain = f", {end.draft_gain:.1f}x as fast" if end.draft_gain else ""
    return f"{end.draft_n_accepted:,} of {end.draft_n:,} guessed tokens right{gain}"


def figures(end: Finished) -> str:
    """The figures of an answer on one line, and how it ended unless it came to its own end."""
    ended = {"stop": "", "length": ", cut at the limit", "cancelled": ", stopped"}[end.reason]
    prefill = shown_prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms - end.pictures_ms)
    if not end.predicted_n and end.reason == "stop":  # an embedding
        rate = "" if prefill is None else f" ({prefill:.0f} tok/s)"
        took = as_latency(end.prompt_ms / 1e3)
        return f"{counted(end.prompt_n, 'token')} ({end.cached_n:,} cached) read in {took}{rate}"
    decode = decode_rate(end.predicted_n, end.predicted_ms)
    first_token = as_latency(end.prompt_ms / 1e3)
    guesses = f", {guessed(end)}" if end.draft_n else ""
    pictures = f", pictures seen in {as_latency(end.pictures_ms / 1e3)}" if end.pictures_ms else ""
    # a server may not say how long the prompt was
    prompt = (
        f"prompt {counted(end.prompt_n, 'token')} ({end.cached_n:,} cached){pictures}, "
        if end.prompt_n
        else ""
    )
    return (
        f"{prompt}first token after {first_token}{'' if prefill is None else f' ({prefill:.0f} tok/s)'}; "
        f"reply {counted(end.predicted_n, 'token')}{f', {decode:.1f} tok/s' if decode else ''}{guesses}{ended}"
    )


def say(messages: TextIO, *sentences: str) -> None:
    """Writes one line that begins with the program's name. On a terminal, it is broken between words. Where nothing can
    be written, as on a full disk, the program goes on."""
    text = " ".join(("orin-chat:", *(one_line(text) for text in sentences if text)))
    if messages.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    with suppress(OSError):
        print(text, file=messages, flush=True)


class ProgressLine:
    """A line that overwrites itself without escape sequences. Writes nothing if `stream` is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._active = stream.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]
        if self._active and text != self._shown:
            self._stream.write("\r" + text.ljust(len(self._shown)) + ("" if text else "\r"))
            self._stream.flush()
            self._shown = text

    def clear(self) -> None:
        self.show("")
