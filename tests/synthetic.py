"""A model that computes nothing, behind the real worker: tokens at any rate, and every way to fail.

engine = tests.synthetic.engine(rate=1000, prefill_s=0.5)     a LocalEngine to give to a screen
python -m tests.synthetic --rate 1000 FD                      what that starts
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import itertools
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine import errors
from engine.protocol import outbox, worker
from engine.protocol.client import LocalEngine
from engine.protocol.events import (
    Chat,
    EngineOptions,
    Finished,
    Generate,
    KernelProfile,
    KernelTime,
    Loading,
    Measure,
    Measured,
    ModelInfo,
    Prefilling,
    Profile,
    RawText,
    Ready,
    StopReason,
    Thinking,
    Token,
    TopToken,
    Tune,
    Tuned,
    Warming,
)
from engine.protocol.served_model import Report
from tests.paths import ROOT

THOUGHT = (
    "The question is about streaming. I will show a list, some code and a table, and then say it again. "
)

MARKDOWN = """\
# A synthetic answer

It has **bold**, *italic*, `code`, a [link](https://example.org) and characters that take several bytes: \
naïve, 漢字, 😀.

1. First, a list.
2. Then, code:

```python
def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
```

| token | rate |
|-------|-----:|
| first |   10 |
| last  | 1000 |

> And a quotation, before it begins again.

"""


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What the model does. Times in seconds, positions in tokens of the answer; -1 is never.

    In `text`, "{prompt}" stands for what the user said last. The text is repeated up to `tokens` tokens.
    """

    rate: float = 50.0  # tokens a second; 0 is as fast as possible
    tokens: int = 400
    thinking: int = 0
    text: str = MARKDOWN
    load_s: float = 0.2
    prefill_s: float = 0.1
    context_length: int = 4096
    name: str = "Synthetic 0.5B"
    load_failure: str = ""  # an exception's name: of engine.errors, or "MemoryError", "RuntimeError"...
    warm_up_fails: bool = False  # once it is ready
    warm_up_s: float = 0.0
    failure: str = ""  # the same, in the answer, at token `fail_at`
    fail_at: int = 0
    device_fails: bool = False  # with `failure`, or after it
    die_at: int = -1  # SIGKILL
    hang_at: int = -1  # deaf to Cancel
    until: str = ""  # the file that ends a hang; else death waits for it, or loading if there is neither
    when_answered: str = ""  # a file that is made when all tokens of an answer are there, sent or not
    profile_s: float = 0.0
    deaf: bool = False  # to Cancel, all the time
    send_interval_s: float = 0.001  # between two parcels of events; the real worker leaves 10 ms


def engine(**behaviour: Any) -> LocalEngine:
    """A LocalEngine whose process runs a model that behaves as told (the fields of Behaviour)."""
    Behaviour(**behaviour)  # a knob that does not exist fails here
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in behaviour.items()]
    return LocalEngine(
        EngineOptions(model_path="synthetic.gguf", backend="CPU"),
        environment={"PYTHONPATH": str(ROOT)},
        command=(sys.executable, "-m", "tests.synthetic", *arguments),
    )


class SyntheticModel:
    """It is its own scheduler, which answers one request after another."""

    def __init__(self, behaviour: Behaviour, report: Report) -> None:
        self.behaviour, self.scheduler = behaviour, self
        self._waiting: deque[tuple[Any, ...]] = deque()
        self.cache: list[str] = []  # the tokens that a KV cache would hold
        total_bytes, steps = 500_000_000, 10
        for step in range(1, steps + 1):
            time.sleep(behaviour.load_s / 2 / steps)
            report(Loading(done_bytes=total_bytes * step // steps, total_bytes=total_bytes))
        for step in range(1, steps + 1):
            time.sleep(behaviour.load_s / 2 / steps)
            report(Warming(done=step, total=steps))
        if behaviour.hang_at < 0 and behaviour.die_at < 0 and behaviour.until:
            _wait_for(behaviour.until)
        _fail(behaviour.load_failure, "while it loads")
        self.ready = Ready(
            model=ModelInfo(
                name=behaviour.name,
                architecture="llama",
                quantization="Q6_K",
                parameters=500_000_000,
                file_bytes=total_bytes,
                trained_context=behaviour.context_length,
                thinks=behaviour.thinking > 0,
            ),
            backend="CPU",
            device_name="no device",
            context_length=behaviour.context_length,
            load_ms=0.0,
        )

    def read_pictures(self, request: Generate) -> Iterator[object]:
        return iter(())

    def begin(self, request: Generate, report: Report) -> Any:
        return request, report

    def add(
        self, answer: Any, cancelled: Callable[[], bool], end: Callable[[Any], None], came_s: float
    ) -> None:
        self._waiting.append((*answer, cancelled, end))

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        request, report, cancelled, end = self._waiting.popleft()
        try:
            end(self.generate(request, report, cancelled))
        except Exception as error:
            end(error)

    def generate(self, request: Generate, report: Report, cancelled: Callable[[], bool]) -> Finished:
        do, started = self.behaviour, time.perf_counter()
        prompt = _prompt_tokens(request)
        if len(prompt) >= do.context_length:
            raise errors.ContextFullError(
                f"The prompt has {len(prompt)} tokens and the context holds {do.context_length}.",
                "Start a new chat, or shorten the prompt.",
            )
        cached = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(prompt, self.cache, strict=False)
            )
        )
        cached = 0 if request.fresh else min(cached, len(prompt) - 1)
        reason: StopReason = "length"
        for step in range(11):
            done = cached + (len(prompt) - cached) * step // 10
            report(Prefilling(request_id=request.request_id, done=done, total=len(prompt), cached=cached))
            time.sleep(do.prefill_s / 10 if step < 10 else 0)
        self.cache = prompt.copy()
        most = min(do.tokens, do.context_length - len(prompt))
        if request.max_tokens is not None:
            most = min(most, request.max_tokens)
        if most == do.tokens and not request.ignore_eos:
            reason = "stop"
        first = last = time.perf_counter()
        count = 0
        for count, (kind, text) in enumerate(itertools.islice(self._answer(request), most), 1):
            if not do.deaf and cancelled():
                count, reason = count - 1, "cancelled"
                break
            self._misbehave(count - 1, request)
            top = tuple(TopToken(id=count - 1 + i, logprob=-0.5 - i) for i in range(request.logprobs))
            logprob = -0.5 if request.logprobs else None
            report(kind(request_id=request.request_id, id=count - 1, text=text, logprob=logprob, top=top))
            self.cache.append(text)
            last = time.perf_counter()
            if count == 1:
                first = last
            if do.rate:
                _sleep_until(first + count / do.rate, (lambda: False) if do.deaf else cancelled)
        if do.when_answered:
            Path(do.when_answered).touch()
        return Finished(
            request_id=request.request_id,
            reason=reason,
            prompt_n=len(prompt),
            cached_n=cached,
            prompt_ms=(first - started) * 1e3,
            predicted_n=count,
            predicted_ms=(last - first) * 1e3,
            load_ms=0.0,
            seed=request.sampling.seed or 0,
        )

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        if self.behaviour.warm_up_fails:
            raise errors.BackendError("The GPU stopped.", "Restart the engine.")
        _sleep_until(time.perf_counter() + self.behaviour.warm_up_s, interrupted)

    def check_device(self) -> None:
        if self.behaviour.device_fails:
            raise RuntimeError("CUDA Error 719, unspecified launch failure")

    def measure(self, request: Measure) -> Measured:
        return Measured(
            request_id=request.request_id, copy_gbps=100.0, kernels_per_token=100, device_bytes=600_000_000
        )

    def profile(self, request: Profile, interrupted: Callable[[], bool]) -> KernelProfile:
        _sleep_until(time.perf_counter() + self.behaviour.profile_s, interrupted)
        if interrupted():
            raise errors.PreemptedError("The profile was given up for a prompt.")
        kernels = (
            KernelTime(name="product", role="FFN down", calls=20, total_us=600.0, bytes=50_000_000),
            KernelTime(name="softmax", role="attention", calls=40, total_us=200.0, bytes=2_000_000),
            KernelTime(name="argmax", role="sampling", calls=1, total_us=10.0, bytes=500_000),
        )
        return KernelProfile(
            request_id=request.request_id, step=request.step, position=len(self.cache), tokens=1,
            kernels=kernels, wall_us=1000.0, rounds=10,
        )  # fmt: skip

    def tune(self, request: Tune, interrupted: Callable[[], bool]) -> Tuned:
        _sleep_until(time.perf_counter() + self.behaviour.profile_s, interrupted)
        return Tuned(
            request_id=request.request_id, before_us=1000.0, after_us=900.0, left=3 if interrupted() else 0
        )

    def _answer(self, request: Generate) -> Iterator[tuple[type[Token], str]]:
        said = "".join(_prompt_texts(request)[-1:])
        thought = itertools.islice(itertools.cycle(_pieces(THOUGHT)), self.behaviour.thinking)
        if self.behaviour.thinking and not (isinstance(request.prompt, Chat) and not request.prompt.think):
            yield Thinking, ""
            yield from ((Thinking, piece) for piece in thought)
            yield Thinking, ""
        yield from (
            (Token, piece)
            for piece in itertools.cycle(_pieces(self.behaviour.text.replace("{prompt}", said)))
        )

    def _misbehave(self, position: int, request: Generate) -> None:
        do = self.behaviour
        if position == do.fail_at:
            _fail(do.failure, f"in answer to {_prompt_texts(request)[-1]}")
        if position == do.die_at:
            if do.until:
                _wait_for(do.until)
            assert worker._server
            worker._server._outbox.close()  # all that came before is sent, however busy the machine is
            os.kill(os.getpid(), signal.SIGKILL)
        if position == do.hang_at:
            _wait_for(do.until)


def _wait_for(path: str) -> None:
    while not (path and Path(path).exists()):
        time.sleep(0.01)


def _sleep_until(end: float, interrupted: Callable[[], bool]) -> None:
    """`end` is a time of time.perf_counter."""
    while (left := end - time.perf_counter()) > 0 and not interrupted():
        time.sleep(min(left, 0.005))


def _prompt_texts(request: Generate) -> list[str]:
    prompt = request.prompt
    if isinstance(prompt, Chat):
        return [message.content for message in prompt.messages]
    return [prompt.text] if isinstance(prompt, RawText) else [f"{token} " for token in prompt.ids]


def _prompt_tokens(request: Generate) -> list[str]:
    return ["<bos>", *(piece for text in _prompt_texts(request) for piece in _pieces(text))]


def _pieces(text: str) -> list[str]:
    """About what a tokenizer makes of it: words with the space before them, cut at eight characters."""
    return re.findall(r"\s?\S{1,8}|\s", text) or [""]


def _fail(name: str, when: str) -> None:
    if not name:
        return
    if cls := getattr(errors, name, None):
        raise cls(f"This is a {name} {when}.", "Ask for something else.")
    raise getattr(builtins, name)(when)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for field in dataclasses.fields(Behaviour):
        kind = type(field.default)
        convert: Any = (lambda text: text == "True") if kind is bool else kind
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=convert, default=field.default)
    parser.add_argument("fd", type=int, help="this end of the socket pair")
    arguments = vars(parser.parse_args())
    sock = socket.socket(fileno=arguments.pop("fd"))
    outbox._SEND_INTERVAL_S = arguments["send_interval_s"]
    worker.serve(sock, lambda options, report: SyntheticModel(Behaviour(**arguments), report))


if __name__ == "__main__":
    main()
