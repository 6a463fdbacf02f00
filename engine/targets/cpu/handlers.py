"""What computes each kind of sublayer on a CPU."""

from engine.description.altup import Correction, LowRank, Merge, Prediction
from engine.description.attention import Attention, LatentAttention
from engine.description.begin import Begin
from engine.description.feed_forward import Dense, Experts, LayerEmbedding, SideBySide
from engine.description.recurrent import DeltaNet, KeyedDeltaNet, Mamba, SelectiveScan, ShortConv
from engine.description.sublayers import Operator
from engine.description.time_mixing import ChannelMix, TimeMix
from engine.targets.cpu.sublayers.attention import AttentionHandler
from engine.targets.cpu.sublayers.begin import BeginHandler
from engine.targets.cpu.sublayers.delta_net import DeltaNetHandler, KeyedDeltaNetHandler
from engine.targets.cpu.sublayers.dense import DenseHandler
from engine.targets.cpu.sublayers.experts import ExpertsHandler
from engine.targets.cpu.sublayers.handler import Handler
from engine.targets.cpu.sublayers.latent_attention import LatentAttentionHandler
from engine.targets.cpu.sublayers.layer_embedding import LayerEmbeddingHandler
from engine.targets.cpu.sublayers.mamba import MambaHandler
from engine.targets.cpu.sublayers.selective_scan import SelectiveScanHandler
from engine.targets.cpu.sublayers.short_conv import ShortConvHandler
from engine.targets.cpu.sublayers.side_by_side import SideBySideHandler
from engine.targets.cpu.sublayers.streams import (
    CorrectionHandler,
    LowRankHandler,
    MergeHandler,
    PredictionHandler,
)
from engine.targets.cpu.sublayers.time_mixing import ChannelMixHandler, TimeMixHandler

HANDLERS: dict[type[Operator], type[Handler]] = {
    Attention: AttentionHandler,
    LatentAttention: LatentAttentionHandler,
    DeltaNet: DeltaNetHandler,
    KeyedDeltaNet: KeyedDeltaNetHandler,
    Mamba: MambaHandler,
    SelectiveScan: SelectiveScanHandler,
    ShortConv: ShortConvHandler,
    Dense: DenseHandler,
    Experts: ExpertsHandler,
    SideBySide: SideBySideHandler,
    LayerEmbedding: LayerEmbeddingHandler,
    LowRank: LowRankHandler,
    Prediction: PredictionHandler,
    Correction: CorrectionHandler,
    Merge: MergeHandler,
    TimeMix: TimeMixHandler,
    ChannelMix: ChannelMixHandler,
    Begin: BeginHandler,
}
