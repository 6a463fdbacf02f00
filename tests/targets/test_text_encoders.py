"""Models whose tokens attend to all of a text, on CPUs and as tensor graphs, against the float32 reference."""

import numpy as np
import pytest

from engine.errors import UsageError
from engine.model.text_model import TextModel
from engine.protocol.events import Embedded, EngineOptions, Generate, RawText, TokenIds
from tests import generated_model
from tests.reference import Reference
from tests.thorough import rarely


@pytest.mark.parametrize(
    ("architecture", "kernels", "context", "layers"),
    [
        ("bert", "fused", 160, 2),
        rarely("gemma-embedding", "fused", 160, 2),
        rarely("bert", "graph", 64, 1),
        rarely("nomic-bert-moe", "fused", 160, 2),
        rarely("nomic-bert", "fused", 160, 2),
        rarely("jina-bert-v2", "fused", 160, 2),
        rarely("jina-bert-v2", "graph", 64, 1),
        rarely("modern-bert", "fused", 160, 4),
        rarely("nomic-bert-moe", "graph", 160, 2),
        rarely("gemma-embedding", "graph", 160, 2),
    ],
)
def test_embeddings(tmp_path, architecture, kernels, context, layers):
    """Of texts of several lengths, also one that fills the context, with windows shorter than most of them."""
    path = generated_model.write(
        tmp_path / "m.gguf",
        architecture=architecture,
        quant="F32",
        context=context,
        layers=layers,
        kv_heads=4,
    )
    model = TextModel(EngineOptions(model_path=str(path), kernels=kernels), lambda _: None)
    assert model.context_length == context
    reference, draw = Reference(path), np.random.default_rng(0)
    for n, pooling in ((1, "mean"), (40, "cls"), (context, "mean"), (60, "last")):
        tokens, events = draw.integers(0, 256, n).tolist(), []
        request = Generate(request_id=0, prompt=TokenIds(ids=tuple(tokens)), pooling=pooling)
        model.generate(request, events.append, lambda: False)
        [values] = [np.frombuffer(e.values, "<f4") for e in events if isinstance(e, Embedded)]
        wanted = reference.pooled(tokens, pooling)
        assert np.abs(values - wanted).max() < 1e-5 * np.sqrt((wanted * wanted).mean()), (n, pooling)
    with pytest.raises(UsageError, match="answers nothing"):
        model.begin(Generate(request_id=0, prompt=RawText(text="Hi")), print)
