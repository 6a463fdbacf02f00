"""What `orin-chat board` measures, and the earlier figures (board.toml)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from app.bench.results import Result
from engine.errors import UsageError

_DATA = Path(__file__).with_name("board.toml")


class BoardModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model to measure. One that is `at_hand` is measured only if it is on this machine, with the first setup of each
    backend."""

    name: str
    title: str
    at_hand: bool = False


class PublishedFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens a second of decode on an AGX Orin that others have published. It is of models of an architecture, with so
    many parameters, in billions."""

    title: str
    engine: str
    tokens_per_s: float
    architecture: str
    billions: tuple[float, float]

    def fits(self, result: Result) -> bool:
        least, most = self.billions
        architecture = result.model_type.partition(" ")[0]
        return architecture == self.architecture and least <= result.model_n_params / 1e9 <= most


class BoardSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to run a model. One that is `asked_for` is measured only if the user names it."""

    name: str
    title: str
    backend: str
    kernels: str
    jitbeam: int = 0
    asked_for: bool = False

    def preset(self) -> str:
        """The text of a preset file."""
        return (
            f'title = "{self.title}"\nbackend = "{self.backend}"\nkernels = "{self.kernels}"\n'
            f"jitbeam = {self.jitbeam}\n"
        )


class Board(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`figures`: earlier tokens/s, by model name, setup name (or llama.cpp), and test name."""

    models: list[BoardModel] = msgspec.field(name="model")
    setups: list[BoardSetup] = msgspec.field(name="setup")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    published: list[PublishedFigure] = []

    def earlier(self, model: str, setup: str) -> Mapping[str, float]:
        """Tokens/s by test name; empty if none are known."""
        return self.figures.get(model, {}).get(setup, {})


def load(models: Sequence[str] = (), setups: Sequence[str] = (), present: Collection[str] = ()) -> Board:
    """The board, with other models (names or files) and only some setups if these are named. `present`: the names of
    models that are on this machine. Raises UsageError for an unknown setup."""
    board = msgspec.toml.decode(_DATA.read_bytes(), type=Board)
    titled = {model.name: model for model in board.models}
    named = [titled.get(name) or BoardModel(name=name, title=Path(name).name) for name in models]
    if unknown := set(setups) - {setup.name for setup in board.setups}:
        names = ", ".join(setup.name for setup in board.setups)
        raise UsageError(f"There is no setup {unknown.pop()!r}.", f"Choose from {names}.")
    chosen = [s for s in board.setups if (s.name in setups if setups else not s.asked_for)]
    usual = [model for model in board.models if not model.at_hand or model.name in present]
    return structs.replace(board, models=named or usual, setups=chosen)


@dataclass(frozen=True)
class Lengths:
    """Which prompts and generations are measured, in tokens, and how often each is repeated."""

    prompts: tuple[int, ...] = (32, 128, 256, 512)
    gen: tuple[int, ...] = (128,)
    repetitions: int = 2
    depths: tuple[int, ...] = (0, 4096)

    @property
    def names(self) -> list[str]:
        """The names of these tests from an empty context: tg128, pp32."""
        return [*(f"tg{n}" for n in self.gen if n), *(f"pp{n}" for n in self.prompts if n)]

    def arguments(self) -> list[str]:
        """The arguments of `orin-chat bench`."""
        lengths = {"-p": self.prompts, "-n": self.gen, "-d": self.depths, "-r": (self.repetitions,)}
        return [part for flag, ns in lengths.items() for part in (flag, ",".join(map(str, ns or (0,))))]
