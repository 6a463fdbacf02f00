"""What one key may ask of the server: requests and tokens a minute, and requests at a time.

Where all clients have the same key, or none, each address has these limits.
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from app.serve.errors import ApiError

MINUTE_S = 60.0


@dataclass(frozen=True)
class Limits:
    """None: as many as there are. `tokens` are those of prompts and answers."""

    requests: int | None = None
    tokens: int | None = None
    open: int | None = None

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Reads "requests=60,tokens=100000,open=4", or some of these. Raises ArgumentTypeError."""
        names = {field.name for field in fields(cls)}
        given: dict[str, int] = {}
        for part in text.replace(" ", "").split(","):
            name, _, number = part.partition("=")
            if name not in names or name in given or not number.isdecimal() or not 0 < int(number) < 2**31:
                raise ArgumentTypeError(f"must be such as requests=60,tokens=100000,open=4, not {text!r}")
            given[name] = int(number)
        return cls(**given)


NO_LIMITS = Limits()


@dataclass
class _Used:
    """What a key has asked in the last minute, oldest first: when, and how many tokens the request had."""

    requests: deque[float] = field(default_factory=deque)
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    open: int = 0

    def forget(self, before_s: float) -> None:
        while self.requests and self.requests[0] <= before_s:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= before_s:
            self.tokens.popleft()


class Budgets:
    """Counts what each key uses of its `limits`."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._used: dict[str, _Used] = {}

    def enter(self, who: str) -> None:
        """Begins a request. Raises ApiError, with the time after which it may be tried again, if it is one too many."""
        now, limits = self._clock(), self._limits
        for name in [name for name, used in self._used.items() if self._is_idle(used, now)]:
            del self._used[name]
        used = self._used.setdefault(who, _Used())
        if limits.open is not None and used.open >= limits.open:
            raise _too_many(f"This key may have {limits.open} requests open at a time.", 1)
        if limits.requests is not None and len(used.requests) >= limits.requests:
            wait_s = used.requests[-limits.requests] + MINUTE_S - now
            raise _too_many(f"This key may ask {limits.requests} times a minute.", wait_s)
        if limits.tokens is not None and sum(n for _, n in used.tokens) >= limits.tokens:
            wait_s = used.tokens[0][0] + MINUTE_S - now
            raise _too_many(f"This key may use {limits.tokens:,} tokens a minute.", wait_s)
        used.open += 1
        used.requests.append(now)

    def leave(self, who: str, tokens: int) -> None:
        """Ends a request that had so many tokens."""
        used = self._used[who]
        used.open -= 1
        if tokens:
            used.tokens.append((self._clock(), tokens))

    def _is_idle(self, used: _Used, now: float) -> bool:
        used.forget(now - MINUTE_S)
        return not (used.open or used.requests or used.tokens)


def _too_many(message: str, wait_s: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=headers)
