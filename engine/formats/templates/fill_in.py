"""Tokens with which models of code are asked to fill in what lies between two texts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.formats.gguf import GGUF
from engine.formats.tokens.tokenizer import Tokenizer

# As models write them: Qwen, StarCoder, Granite, DeepSeek, CodeLlama, GLM, Falcon. All three are from one family.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
_REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<reponame>", "<fim-repo>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")


class FillIn(NamedTuple):
    """Ids of the tokens before the text that comes first, before the one that comes last, and before the answer. If the
    model has them, `repository` comes before the name of a project and `file` before that of a file. A reply ends at
    one of `ends`."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, file: GGUF, tokenizer: Tokenizer) -> "FillIn | None":
        """The tokens that the metadata of a model file name, else those with a usual name; None if there are none."""
        known = tokenizer.special_tokens

        def told(name: str, names: Sequence[str] = ()) -> int | None:
            id = file.get(f"tokenizer.ggml.fim_{name}_token_id", int, -1)
            if 0 <= id < tokenizer.vocab_size:
                return id
            return next((known[each] for each in names if each in known), None)

        three = [id for name in ("pre", "suf", "mid") if (id := told(name)) is not None]
        if len(three) < 3:
            found = next((names for names in _NAMES if all(name in known for name in names)), None)
            if found is None:
                return None
            three = [known[name] for name in found]
        prefix, suffix, middle = three
        repository, named_file = told("rep", _REPOSITORY), told("sep", _FILE)
        ends = (*three, repository, named_file, told("pad", _PADDING))
        known_ends = frozenset(id for id in ends if id is not None)
        return cls(prefix, suffix, middle, repository, named_file, known_ends)

    def prompt(
        self,
        tokenizer: Tokenizer,
        before: str,
        after: str,
        begun: str = "",
        files: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> tuple[int, ...]:
        """The ids of a prompt that asks for the text between two others, in which special tokens are plain text.
        `begun` is what the answer begins with, `files` are names and texts of others. Beyond `room` tokens the
        beginnings of `files` and of `before`, and the end of `after`, are left out."""
        encode: Callable[[str], list[int]] = tokenizer.encode
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        others, first, last, rest = self._files(encode, files), encode(before), encode(after), encode(begun)
        if room is not None:
            room = max(0, room - len(bos) - len(rest) - 3)
            last = last[: max(room - len(first), room // 4)]
            first = first[max(0, len(first) + len(last) - room) :]
            others = others[max(0, len(others) + len(first) + len(last) - room) :]
        return (*bos, *others, self.prefix, *first, self.suffix, *last, self.middle, *rest)

    def _files(self, encode: Callable[[str], list[int]], files: Sequence[tuple[str, str]]) -> list[int]:
        """Other files as models of code are trained on them (https://arxiv.org/abs/2409.12186, section 3.2)."""
        if not files:
            return []
        if self.file is None:
            return encode("".join(f"{name}\n{text}\n\n" for name, text in files))
        ids = [] if self.repository is None else [self.repository, *encode("project\n")]
        for name, text in (*files, ("current", "")):
            ids += [self.file, *encode(f"{name}\n{text}")]
        return ids
