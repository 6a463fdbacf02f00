import pytest

from engine.peers.llama_server import LlamaServer
from engine.protocol.events import EngineOptions
from tests import generated_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(generated_model.write(tmp_path_factory.mktemp("model") / "noise.gguf", architecture="qwen3"))


@pytest.fixture
async def peers(model):
    """Makes LlamaServers for the model, and closes them afterwards: `peers(binary, url=…)`."""
    made = []

    def make(binary=None, *, model=model, context_length=256, parallel=1, kv="f16", **arguments):
        options = EngineOptions(
            model_path=model, backend="CPU", context_length=context_length, parallel=parallel, kv=kv
        )
        made.append(LlamaServer(options, binary, **arguments))
        return made[-1]

    yield make
    for peer in made:
        await peer.close()


async def collect(stream):
    return [event async for event in stream]
