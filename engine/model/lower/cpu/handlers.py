"""What computes each kind of sublayer on a CPU."""

from engine.model.lower.cpu.attention import AttentionHandler
from engine.model.lower.cpu.delta_net import DeltaNetHandler
from engine.model.lower.cpu.dense import DenseHandler
from engine.model.lower.cpu.experts import ExpertsHandler
from engine.model.lower.cpu.handler import Handler
from engine.model.lower.cpu.layer_embedding import LayerEmbeddingHandler
from engine.model.lower.cpu.side_by_side import SideBySideHandler
from engine.model.mixes import Attend, Beside, Delta, Dense, Experts, LayerEmbedding, Mix

HANDLERS: dict[type[Mix], type[Handler]] = {
    Attend: AttentionHandler,
    Delta: DeltaNetHandler,
    Dense: DenseHandler,
    Experts: ExpertsHandler,
    Beside: SideBySideHandler,
    LayerEmbedding: LayerEmbeddingHandler,
}
