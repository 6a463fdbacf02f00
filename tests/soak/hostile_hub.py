"""A hub, or what stands in its place, that answers anything at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis import strategies as st

from engine.catalog import hub
from engine.catalog.downloads import find_on_hub
from engine.catalog.names import HubModel
from engine.errors import OrinError
from tests.catalog.fake_hub import FakeHub
from tests.soak.counts import Counts
from tests.soak.drawn import drawn

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    ["id", "sha", "siblings", "gguf", "private", "tags", "cardData", "lastModified", "author"]
)
_OF_FILE = st.sampled_from(["rfilename", "size", "blobId", "lfs"])
_ANSWERS = st.tuples(
    st.dictionaries(_KEYS, _VALUES, max_size=2),
    st.dictionaries(_OF_FILE, _VALUES, max_size=2),
    st.none() | st.binary(max_size=40),
)


@contextmanager
def _a_hub() -> Iterator[FakeHub]:
    with FakeHub({"model-Q8_0.gguf": b"a model"}) as fake, tempfile.TemporaryDirectory() as folder:
        environment = {"HF_ENDPOINT": fake.url, "HF_HOME": folder, "HF_TOKEN_PATH": f"{folder}/none"}
        with mock.patch.dict(os.environ, environment), mock.patch.object(hub, "FIRST_DELAY_S", 0.001):
            yield fake


def run(tries: int, number: int = 0) -> Counts:
    """Changes fields of the hub's answer, or answers with other bytes."""
    counts = Counts("answers of a hub")
    with _a_hub() as fake:
        info = fake.info()

        @drawn(tries, number, _ANSWERS)
        def ask(answer: tuple[dict[str, object], dict[str, object], bytes | None]) -> None:
            of_repository, of_file, instead = answer
            [sibling] = info["siblings"]
            whole = {**info, "siblings": [{**sibling, **of_file}], **of_repository}
            body = json.dumps(whole).encode() if instead is None else instead
            fake.info = lambda: body  # type: ignore[method-assign]
            with counts.trying():
                try:
                    find_on_hub(HubModel(fake.repository))
                    counts.survived["taken"] += 1
                except OrinError:
                    counts.survived["refused"] += 1

        ask()
    return counts
