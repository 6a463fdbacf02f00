"""Keeps an answer to a grammar: tokens after which the text can no longer fit it are masked.

The library llguidance compiles grammars and computes the masks (https://github.com/guidance-ai/llguidance,
docs/syntax.md for Lark, docs/json_schema.md). It is an optional extra, and is imported with the first grammar.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import UsageError, one_line
from engine.formats.channels import channel_marks
from engine.formats.thinking import ReplySplitter
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tools.forms import CALL_TOKENS
from engine.formats.tools.grammars import WHITE_SPACE
from engine.protocol.events import Grammar
from engine.runtime.number_end import MAX_DIGITS, DigitTokens
from engine.runtime.sampling import Logits
from engine.system import own_thread
from engine.system.invocation import pip_install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE = 1 << 18
"""Characters. The library bounds its own work, but reads a source to its end before: 10 MB would take it 10 s, in which
no other conversation goes on, and half a gigabyte."""
MAX_REASON = 200  # characters
MAX_WORK_S, MAX_TOKEN_S = 0.5, 0.005
"""What a grammar's masks may take of an answer, and for each of its tokens: other conversations wait for it. Usual ones
take well below a millisecond."""
_KEPT = 4
"""Compiled grammars. To compile one may take seconds, and a request may have 128 prompts with the same one."""
_STACK_BYTES = 256 << 20
"""The library compiles rules and references within each other. A chain of 1,000 takes more than the 8 MB of other
threads, and would end the process; one as long as a source may be takes less than 32 MB. Only what is used is taken."""
_SIZING = threading.Lock()
"""The size of stacks is one for all threads that begin."""
_T = TypeVar("_T")


class Grammars:
    """Compiles grammars for the vocabulary of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._digits = DigitTokens(tokenizer)
        self._vocabularies: dict[bool, LLTokenizer] = {}
        self._reading = threading.Lock()
        self._kept = lru_cache(_KEPT)(self._compiled)

    def prepare(self) -> None:
        """Reads the vocabulary for JSON schemas, if the library is there: for a moment when nothing is to be answered,
        since Python's lock is held meanwhile."""
        with suppress(ModuleNotFoundError, UsageError):
            self._vocabulary(is_whole=False)

    def _vocabulary(self, is_whole: bool) -> LLTokenizer:
        """Raises UsageError for a model that cannot end an answer."""
        with_channels = is_whole and bool(channel_marks(self._tokenizer.special_tokens))
        with self._reading:  # prompts are made in several threads
            if with_channels not in self._vocabularies:
                self._vocabularies[with_channels] = _vocabulary(self._tokenizer, with_channels)
            return self._vocabularies[with_channels]

    def constraint(self, grammar: Grammar, splitter: ReplySplitter | None, open_mark: str) -> Constraint:
        """Keeps one answer to `grammar`. `splitter` gets the text of the reply, which may begin with `open_mark` and
        thinking. Without `prepare`, the first call takes about a second for a large vocabulary. Raises UsageError if
        the grammar is not valid, or the library is not installed."""
        try:
            import llguidance  # noqa: F401
        except ModuleNotFoundError:
            raise UsageError(
                "Grammars and JSON schemas need the library llguidance, which is not installed.",
                f"Install it: {pip_install('llguidance')}",
            ) from None
        if len(grammar.source) > MAX_SOURCE:
            raise _invalid(f"it has more than {MAX_SOURCE:,} characters")
        matcher = self._kept(grammar)
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        matcher = matcher.deep_copy()  # in less than a millisecond
        digits = self._digits if grammar.ends_numbers else None
        if grammar.kind == "reply":
            return Constraint(matcher, digits)
        goes_on = _all_but(self._tokenizer.eos_ids, self._tokenizer.vocab_size)
        opens = self._tokenizer.special_tokens.get(open_mark)
        return Constraint(matcher, digits, splitter, opens, goes_on)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        """Raises UsageError if the library cannot read it."""
        vocabulary = self._vocabulary(is_whole=grammar.kind == "reply")
        return _in_deep_stack(lambda: _compiled(grammar, vocabulary))


class Constraint:
    """A grammar and what it has seen of one answer."""

    def __init__(
        self,
        matcher: LLMatcher,
        digits: DigitTokens | None,
        splitter: ReplySplitter | None = None,
        opens: int | None = None,
        goes_on: NDArray[np.uint32] | None = None,
    ) -> None:
        """`opens` is the token that opens thinking, which may come first. `goes_on`: the tokens that do not end the
        reply, which are allowed while it is thinking (None: all), so that an answer follows."""
        self._matcher = matcher
        self._digits, self._n_digits = digits, 0  # that the answer ends with
        self._splitter = splitter
        self._opens = opens
        self._goes_on = goes_on
        self._begun = False
        self._left_s = MAX_WORK_S

    def allowed(self) -> NDArray[np.uint32] | None:
        """A bit for each token, the lowest first, which says whether the grammar allows it next, uint32 (words,). None:
        all are."""
        if not self._applies:
            return self._goes_on
        started = time.thread_time()
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._left_s += MAX_TOKEN_S - (time.thread_time() - started)
        if self._left_s < 0:
            raise _invalid("it takes too long to find out which tokens fit it")
        if self._matcher.is_error():
            raise _invalid(self._matcher.get_error())
        if self._digits and self._n_digits >= MAX_DIGITS:
            words = self._digits.without(words)
        if self._may_open and self._opens is not None:
            words = words.copy()
            words[self._opens // 32] |= np.uint32(1 << self._opens % 32)
        return words

    def masked(self, logits: Logits) -> Logits:
        """The logits, float32 (vocab,), with -inf for tokens that are not `allowed`. They are the same array if all
        are."""
        return _masked(logits, self.allowed())

    def accept(self, token: int) -> None:
        """Takes the token that was chosen, before the splitter gets its text."""
        if self._applies and not (self._may_open and token == self._opens):
            self._begun = True
            self._matcher.consume_token(token)
            if self._digits:
                self._n_digits = self._digits.after(self._n_digits, token)

    @property
    def _may_open(self) -> bool:
        return (
            not self._begun and self._opens is not None and bool(self._splitter and self._splitter.may_open)
        )

    @property
    def _applies(self) -> bool:
        return self._begun or self._splitter is None or self._splitter.answers_next


class Forced:
    """Lets an answer begin with the tokens `ids`; then `rest` keeps it, if there is one."""

    def __init__(self, ids: Sequence[int], vocab_size: int, rest: Constraint | NotYet | None) -> None:
        self._ids, self._rest, self._given = ids, rest, 0
        self._words = -(-vocab_size // 32)

    @property
    def is_done(self) -> bool:
        return self._given == len(self._ids)

    def allowed(self) -> NDArray[np.uint32] | None:
        """As `Constraint.allowed`."""
        if self.is_done:
            return self._rest.allowed() if self._rest else None
        words = np.zeros(self._words, np.uint32)
        id = self._ids[self._given]
        words[id // 32] = np.uint32(1 << id % 32)
        return words

    def masked(self, logits: Logits) -> Logits:
        """As `Constraint.masked`."""
        return _masked(logits, self.allowed())

    def accept(self, token: int) -> None:
        """As `Constraint.accept`."""
        if not self.is_done:
            self._given += 1
        elif self._rest:
            self._rest.accept(token)


class NotYet:
    """Keeps the tokens `ends`, which end an answer, from its first `n`."""

    def __init__(self, n: int, ends: Iterable[int], vocab_size: int) -> None:
        self._left = n
        self._words = _all_but(ends, vocab_size)

    def allowed(self) -> NDArray[np.uint32] | None:
        """As `Constraint.allowed`."""
        return self._words if self._left > 0 else None

    def masked(self, logits: Logits) -> Logits:
        """As `Constraint.masked`."""
        return _masked(logits, self.allowed())

    def accept(self, token: int) -> None:
        """As `Constraint.accept`."""
        self._left -= 1


def _compiled(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """Raises UsageError if the library cannot read it."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = (
            LLMatcher.grammar_from_lark(grammar.source)
            if grammar.kind != "json_schema"
            else LLMatcher.grammar_from_json_schema(
                grammar.source, overrides={"whitespace_pattern": WHITE_SPACE}
            )
        )
    except ValueError as error:
        raise _invalid(str(error)) from None
    # A fraction of the library's own limits: no other conversation goes on while it works.
    limits = LLParserLimits(initial_lexer_fuel=300_000, max_grammar_size=50_000)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first takes longest, and here no other conversation waits for it
    return matcher


def _in_deep_stack(work: Callable[[], _T]) -> _T:
    """What `work` returns or raises, in a thread that has a stack for much recursion."""
    with _SIZING:
        before = threading.stack_size(_STACK_BYTES)
        try:
            done = own_thread.begin(work, "grammar", daemon=False)
        finally:
            threading.stack_size(before)
    return done.result()


def _all_but(ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """A bit for each token but these, as `Constraint.allowed`."""
    words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    for id in ids:
        words[id // 32] &= ~np.uint32(1 << id % 32)
    return words


def _masked(logits: Logits, words: NDArray[np.uint32] | None) -> Logits:
    if words is None:
        return logits
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.size].astype(bool)
    masked = np.full_like(logits, -np.inf)
    np.copyto(masked[: allowed.size], logits[: allowed.size], where=allowed)
    return masked


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer. `with_channels`: the marks of gpt-oss's messages are
    special, so that a grammar can name them; else they are text."""

    def __init__(self, tokenizer: Tokenizer, with_channels: bool) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
        hidden = [id for id in range(tokenizer.vocab_size) if tokenizer.is_hidden(id)]
        marks = channel_marks(tokenizer.special_tokens) if with_channels else ()
        self.special_token_ids = sorted({*hidden, *marks, *tokenizer.eos_ids})
        shown = sorted(CALL_TOKENS & tokenizer.special_tokens.keys())
        self._in_call_marks = re.compile(f"({'|'.join(map(re.escape, shown))})" if shown else "((?!))")

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text that a grammar leaves no choice about. The marks of calls are tokens of their own there:
        spelled out, they are nothing that the model has seen."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        pieces = self._in_call_marks.split(text)
        return self._tokenizer.encode_segments((piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece)


def _vocabulary(tokenizer: Tokenizer, with_channels: bool) -> LLTokenizer:
    """Raises UsageError for a model that cannot end an answer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.eos_ids:
        raise UsageError("This model has no token that ends an answer, so it cannot keep to a grammar.")
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, with_channels)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eos_ids),
    )


def _invalid(reason: str) -> UsageError:
    """`reason` may be followed by the state of the library's parser or by our grammar, and may quote what was sent."""
    reason = one_line(re.split(r"<state>|\n\s*\d+ \| ", reason)[0])
    if reason.startswith("NoExtension"):
        reason = "no text fits it"
    if len(reason) > MAX_REASON:
        reason = f"{reason[:MAX_REASON]}…"
    return UsageError(f"The grammar or JSON schema cannot be used: {reason.rstrip('.')}.")
