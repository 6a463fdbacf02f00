"""One request while it is answered: its tokens, how the next one is chosen, and what is reported of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial

from engine.errors import SHORTEN, ContextFullError, UsageError
from engine.formats.templates.prompt import PromptEncoder, think_splitter
from engine.formats.templates.template import Prompt
from engine.formats.tokens.vocabulary import StreamDecoder
from engine.protocol.events import (
    Chat,
    Event,
    Finished,
    Generate,
    Prefilling,
    Seeing,
    Slot,
    StopReason,
    Thinking,
    Token,
    TopToken,
    decode_rate,
)
from engine.runtime.grammar import Constraint, Forced, Grammars, NotYet
from engine.runtime.model_runner import Drawing, Want
from engine.runtime.pictures import Pictures, Progress
from engine.runtime.sampling import Bias, Logits, LogProbabilities, Sampler

Late = list[Callable[[], None]]
"""What is to be told later, in order."""


class Answers:
    """Makes the answers of one model."""

    def __init__(self, prompts: PromptEncoder, context_length: int, whole_pictures: int = 0) -> None:
        """`whole_pictures`: the most tokens of a step, if a picture's have to be in one; else 0."""
        self._prompts, self._context_length, self._whole = prompts, context_length, whole_pictures
        self._grammars = Grammars(prompts.tokenizer)

    def prepare_grammars(self) -> None:
        """Reads the vocabulary as grammars need it: their first use would take a second."""
        self._grammars.prepare()

    def begin(self, request: Generate, report: Callable[[Event], None]) -> Answer:
        """The answer to a request, with no token yet. Raises ContextFullError, TemplateError and UsageError."""
        prompt = self._prompts.encode(request.prompt, request.sampling.effort, self._context_length)
        limit = _reply_limit(len(prompt.ids), request.max_tokens, self._context_length)
        pictures = Pictures(prompt.pictures, self._whole) if prompt.pictures else None
        answer = Answer(request, prompt, self._prompts, limit, report, pictures)
        vocab_size = self._prompts.tokenizer.vocab_size
        constraint: Constraint | NotYet | None = None
        if request.grammar:
            thinks = isinstance(request.prompt, Chat) and request.prompt.think
            open_mark = prompt.marks.open if thinks else ""
            constraint = self._grammars.constraint(request.grammar, answer.splitter, open_mark)
        elif request.min_tokens:
            constraint = NotYet(request.min_tokens, self._prompts.tokenizer.eos_ids, vocab_size)
        answer.constraint = constraint
        if request.forced:
            if not all(0 <= id < vocab_size for id in request.forced):
                raise UsageError(f"Token ids are from 0 to {vocab_size - 1}.")
            answer.constraint = Forced(request.forced, vocab_size, constraint)
        return answer


class Answer:
    """`tokens` are those of the prompt and of the reply so far; once `reason` says why it ended, no more may follow.
    `cached` of the prompt's tokens were in the KV cache. `left` is the most tokens that may still follow."""

    replies = True
    """Whether tokens follow the prompt at all."""

    def __init__(
        self,
        request: Generate,
        prompt: Prompt,
        prompts: PromptEncoder,
        limit: int,
        report: Callable[[Event], None],
        pictures: Pictures | None,
    ) -> None:
        self.request, self.tokens, self.prompt_n = request, list(prompt.ids), len(prompt.ids)
        self.left, self.cached = limit, 0
        self.pictures = pictures
        self.draft_n = self.draft_n_accepted = 0
        self._timed_n, self._steps_s, self._plain_s = self.prompt_n, 0.0, 0.0
        self.reason: StopReason | None = None if limit else "length"
        self.sampler, self._bias = Sampler(request.sampling), Bias(request.logit_bias)
        self.splitter = think_splitter(request.prompt, prompt)
        self.constraint: Constraint | Forced | NotYet | None = None
        """What keeps the answer to a grammar, to tokens that are given, or from an early end."""
        self._eos_ids, self._decoder = prompts.tokenizer.eos_ids, StreamDecoder(prompts.tokenizer)
        self._report = report
        self.start()

    def start(self) -> None:
        """From now on time counts: a request that has to wait is started when its prompt is read."""
        self._started = self._first_token = self._last_token = time.perf_counter()

    @property
    def stored_n(self) -> int:
        """How many of the tokens have to be in the KV cache before the next one can be computed."""
        return len(self.tokens) - 1

    @property
    def reusable(self) -> list[int]:
        """The first tokens, whose keys and values may be those of earlier conversations."""
        return [] if self.request.fresh else self.tokens[: self.stored_n]

    def want(self, start: int, end: int) -> Want:
        """What a step is to give of the prompt's tokens from `start` to `end`."""
        return "none"

    @property
    def is_best_token(self) -> bool:
        """Whether the next token is the most probable one, so that the host need not choose it."""
        return self.sampler.greedy and not (self.constraint or self.request.logit_bias)

    @property
    def needs_logits(self) -> bool:
        """Whether the logits of the next token are needed: to choose it, or to report its probability."""
        return not self.is_best_token or self.request.logprobs > 0

    @cached_property
    def turn_ends(self) -> list[int]:
        """Where the first turn of the prompt and its last two end, in tokens: other prompts are likely to part with it
        there."""
        tokens = self.tokens[: self.prompt_n]
        ends = [n for n, token in enumerate(tokens, 1) if token in self._eos_ids]
        return ends[:1] + ends[-2:]

    @property
    def checkpoint_ends(self) -> list[int]:
        """Where a recurrent state is worth keeping: also after the last two pictures, of which more is asked."""
        ends = self.pictures.ends[-2:] if self.pictures else []
        return [*ends, *self.turn_ends]

    @property
    def messages_end(self) -> int:
        """Where the messages of the prompt end, in tokens."""
        return max(self.turn_ends, default=self.prompt_n - 1)

    @property
    def drawing(self) -> Drawing:
        """How a device draws the tokens that may follow: those that `choose` would choose."""
        n = len(self.tokens) - self.prompt_n
        uniforms, asked = self.sampler.uniforms(n + self.left)[n:], self.request
        masks = self.constraint is not None
        return Drawing(asked.sampling, self.tokens, uniforms, asked.logit_bias, asked.logprobs, masks)

    def choose(self, logits: Logits) -> int:
        """The next token, chosen on the host. `logits`: float32 (vocab,)."""
        logits = self._bias.added_to(logits)
        masked = self.constraint.masked(logits) if self.constraint else logits
        return self.sampler.sample(masked, self.tokens)

    def report_prefill(self, done: int) -> None:
        """Reports that `done` tokens of the prompt are in the KV cache."""
        self._report(
            Prefilling(request_id=self.request.request_id, done=done, total=self.prompt_n, cached=self.cached)
        )

    def report_picture(self, index: int, progress: Progress) -> None:
        """Reports how far the work on a picture is."""
        assert self.pictures
        placed = self.pictures.placed
        self._report(
            Seeing(
                request_id=self.request.request_id,
                index=index,
                pictures=len(placed),
                tokens=len(placed[index].picture.ids),
                done=progress.done,
                total=progress.total,
                compiles=progress.compiles,
            )
        )

    def add(
        self,
        token: int,
        probabilities: Callable[[int], LogProbabilities],
        late: Late | None = None,
        guess: int | None = None,
    ) -> None:
        """Takes the next token and reports it, or adds that to what comes `late`, if nothing depends on the report.
        `probabilities` gives its log-probability, and so many of the most probable tokens. `guess`: what it was guessed
        to be, if it was."""
        self._last_token = time.perf_counter()
        if len(self.tokens) == self.prompt_n:
            self._first_token = self._last_token
            self.report_prefill(self.prompt_n)
        self.tokens.append(token)
        self.left -= 1
        self.draft_n_accepted += token == guess
        if self.constraint:
            self.constraint.accept(token)
        is_forced = len(self.tokens) - self.prompt_n <= len(self.request.forced)
        goes_on = is_forced or (self.request.ignore_eos and not self.request.grammar)
        if token in self._eos_ids and not goes_on:
            self.reason = "stop"
        elif not self.left:
            self.reason = "length"
        report = partial(self._report_token, token, probabilities, self.reason is not None, token == guess)
        if late is None or self.constraint or self.request.logprobs:
            report()
        else:
            late.append(report)

    def slot(self, stored: int) -> Slot:
        """What the answer does, with `stored` of its tokens in the KV cache."""
        predicted_n = len(self.tokens) - self.prompt_n
        return Slot(
            request_id=self.request.request_id,
            client=self.request.client,
            phase="decode" if self.replies and stored == self.stored_n else "prefill",
            prompt_done=min(stored, self.prompt_n),
            prompt_n=self.prompt_n,
            predicted_n=predicted_n,
            rate=decode_rate(predicted_n, (self._last_token - self._first_token) * 1e3),
        )

    def timed(self, seconds: float, plain_s: float) -> None:
        """Its last step took `seconds`, where one without guesses takes `plain_s` (0: there were prompts too, or that
        is not known)."""
        new, self._timed_n = len(self.tokens) - self._timed_n, len(self.tokens)
        if plain_s:
            self._steps_s += seconds
            self._plain_s += new * plain_s

    def cancel(self) -> None:
        self.reason = "cancelled"

    def finished(self) -> Finished:
        """The end of an answer that has a `reason`. Its `load_ms` is for others to fill in."""
        assert self.reason
        return Finished(
            request_id=self.request.request_id,
            reason=self.reason,
            prompt_n=self.prompt_n,
            cached_n=self.cached,
            prompt_ms=(self._first_token - self._started) * 1e3,
            predicted_n=len(self.tokens) - self.prompt_n,
            predicted_ms=(self._last_token - self._first_token) * 1e3,
            load_ms=0.0,
            seed=self.sampler.seed,
            draft_n=self.draft_n,
            draft_n_accepted=self.draft_n_accepted,
            draft_gain=self._plain_s / self._steps_s if self.draft_n and self._steps_s else 0.0,
            pictures_ms=self.pictures.took_s * 1e3 if self.pictures else 0.0,
        )

    def _report_token(
        self, token: int, probabilities: Callable[[int], LogProbabilities], last: bool, guessed: bool
    ) -> None:
        """`last`: text that was held back is reported too."""
        text = self._decoder.feed(token) + (self._decoder.flush() if last else "")
        thinking = False
        if self.splitter is not None:
            thinking, text = self.splitter.feed(text, token)
            text += self.splitter.flush()[1] if last else ""
        logprob: float | None = None
        top: tuple[TopToken, ...] = ()
        if self.request.logprobs:
            logprob, top = probabilities(self.request.logprobs)
        event = Thinking if thinking else Token
        self._report(
            event(
                request_id=self.request.request_id,
                id=token,
                text=text,
                logprob=logprob,
                top=top,
                guessed=guessed,
            )
        )


def _reply_limit(prompt_n: int, max_tokens: int | None, context_length: int) -> int:
    """The most tokens that the reply may have. Its last token needs no place in the KV cache."""
    limit = context_length - prompt_n + 1
    if limit < 1:
        raise ContextFullError(
            f"The conversation has {prompt_n:,} tokens and the context holds {context_length:,}.",
            SHORTEN,
            tokens=prompt_n,
            most=context_length,
        )
    return limit if max_tokens is None else min(limit, max_tokens)
