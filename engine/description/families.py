"""What is known of each architecture beside what its files say: a table, from which `engine.description.architectures`
reads a model. What each architecture does: its file in src/models of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from engine.description.feed_forward import Activation, Scoring

Grid = Literal["in turn", "blocks", "four blocks"] | None


@dataclass(frozen=True)
class Family:
    """What neither the tensors nor the metadata of an architecture's files say. `interleaved`: rotary pairs are
    neighbours ("norm" in llama_model_rope_type of llama.cpp; else "neox"). Of `full_attention_every` layers the last
    has no window, or the first one with `full_attention_first` (0: no layer has one, whatever the metadata say).
    `plain_windows`: layers with a window have a rotary base of their own, and no scaling. `eps`, `rope_base`,
    `window_base`, `window`, `score_cap` (of attention) and `logit_cap` are those of files that do not say them; 0: no
    cap, and the base of layers with a window is that of the others. Of `unrotated_every` layers the last has no rotary
    embedding; with `unrotated_full`, those without a window have none if others have one. `scaled_embedding`: the
    embedding is multiplied by sqrt(dim). `embedding_scale`, `depth_scale` and `base_width` are those of files that do
    not say the multipliers: of the embedding, of what layers add, which is depth_scale / sqrt(layers), and of logits,
    which are divided by base_width / dim (0: by 1). `long_rope_factor`: that of files of a context of 128k tokens or
    more. In a model of so many layers as `scored_by_width`, scores are multiplied by (dim / heads) ** -0.5.
    `renormalised`: the probabilities of the chosen experts are divided by their sum; `scoring` makes them, or
    `biased_scoring` where they are chosen with a bias; all of files that do not say them. Of `attention_every` layers
    the last has attention, and the others are `recurrent`, unless the metadata say otherwise (0: those that have heads
    of keys have attention). `gated_attention`: in each head the rows of the query come before those of a gate of its
    result. `sigmoid_delta`: the gate of a delta net's result is a sigmoid. `unscaled_attention`: scores are multiplied
    by nothing; `scaled_by_size`: they are divided by a head's elements. `normed_values`: values are normed over a head.
    `chooses_tokens`: in long contexts, attention reads chosen tokens alone (`ModelSpec.reads_all_to`). `distance_bias`:
    scores fall with the distance of tokens (ALiBi), and by so much at most where the files do not say it; if
    `biased_layers`, only in a model of so many, which is not rotated. `chunked`, `weighed_inputs`: see `Attention`,
    `Experts`. `rotates_dense`: the first layers, which have no experts, are rotated. `limits_silu`: the limits of
    experts are those of SiLU, in place of its argument. `halves_rotation`: layers without a window rotate half as many
    dimensions as the files say. `averages_shared`: the result of experts is the mean of the chosen ones' and of the
    shared one's. `unit_norms`: rotated queries and keys are normed over a head, without weights, except in a model of
    `unnormed_experts` experts. `tempered_full`: queries of layers without a window grow with their position, if others
    have one, by this where the files do not say it: the slope, the length, and how many positions later.
    `rotates_first`, `shares_in_turn`, `routes_before`: see `Attention`, `DeltaNet`, `Experts`. `layer_norms`: norms are
    LayerNorms (`ModelSpec.centred`). `multiplied_logits`: by the file's scale of logits, by which others are divided.
    `ungated`: feed-forward layers have no gates. `softplus_gates`: of attention (`Attention.gating`). `curved`:
    feed-forward layers have a curve (see `Dense`). `normed_embedding`: the stream begins with a norm of embeddings,
    without weights. `post_eps`: that of post norms, if it is another one. `halved_width`: feed-forward layers are half
    as wide as the files say. `unweighted`: norms of the stream have no weights. `one_norm`: a feed-forward layer is
    beside attention, and shares its norm. `adds_begin`: layers add the embeddings again (`Begin`).
    `partial_layers`: a layer may have no attention, or no feed-forward layer. `lone_sublayers`: a layer is
    attention, a feed-forward layer or a recurrent one alone. `recurrent_beside`: each attention has a recurrent
    layer beside it. `normed_after`: norms come after the sums. It goes `both_ways` if its files do not say
    otherwise: see `Attention`. `grid`: tokens of pictures have a row and a column, which turn pairs in turn or
    blocks of them (`Rope.sections`). Of pictures, tokens see those after them in the same picture in no layer, in
    all, or in those with a window (`sees_pictures`)."""

    interleaved: bool = False
    activation: Activation = "silu"
    full_attention_every: int = 0
    full_attention_first: bool = False
    plain_windows: bool = False
    eps: float = 1e-5
    rope_base: float = 10_000.0
    window_base: float = 0.0
    unrotated_every: int = 0
    unrotated_full: bool = False
    scaled_embedding: bool = False
    embedding_scale: float = 1.0
    depth_scale: float = 0.0
    base_width: int = 0
    long_rope_factor: float = 1.0
    scored_by_width: int = 0
    renormalised: bool = True
    scoring: Scoring = "softmax"
    biased_scoring: Scoring | None = None
    attention_every: int = 0
    layer_norms: bool = False
    multiplied_logits: bool = False
    ungated: bool = False
    halved_width: bool = False
    curved: bool = False
    softplus_gates: bool = False
    normed_embedding: bool = False
    post_eps: float = 0.0
    unweighted: bool = False
    one_norm: bool = False
    adds_begin: bool = False
    partial_layers: bool = False
    lone_sublayers: bool = False
    recurrent_beside: bool = False
    normed_after: bool = False
    both_ways: bool = False
    recurrent: Literal["delta net", "keyed delta net", "short conv", "mamba", "scan", "head scan"] = (
        "delta net"
    )
    gated_attention: bool = False
    sigmoid_delta: bool = False
    unscaled_attention: bool = False
    scaled_by_size: bool = False
    normed_values: bool = False
    chooses_tokens: bool = False
    distance_bias: float = 0.0
    biased_layers: int = 0
    chunked: bool = False
    weighed_inputs: bool = False
    routes_before: bool = False
    unit_norms: bool = False
    unnormed_experts: int = 0
    tempered_full: tuple[float, int, int] | None = None
    rotates_first: bool = False
    rotates_dense: bool = False
    limits_silu: bool = False
    halves_rotation: bool = False
    averages_shared: bool = False
    shares_in_turn: bool = True
    grid: Grid = None
    window: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    sees_pictures: Literal["no layer", "all layers", "window layers"] = "no layer"


_NO_LAYER = 1 << 30  # of `full_attention_every`

_NEMOTRON_H = Family(
    recurrent="mamba",
    activation="relu2",
    ungated=True,
    lone_sublayers=True,
    unrotated_every=1,
    renormalised=False,
    scoring="sigmoid",
)

_GEMMA = Family(
    activation="gelu",
    full_attention_every=6,
    plain_windows=True,
    eps=1e-6,
    rope_base=1e6,
    window_base=1e4,
    scaled_embedding=True,
)
_GEMMA3 = replace(
    _GEMMA,
    long_rope_factor=8.0,  # all but 1B; files of Ollama do not say it
    scored_by_width=62,  # 27B: LLM_TYPE_27B in gemma2.cpp and gemma3.cpp
    sees_pictures="all layers",
)
_GEMMA4 = replace(_GEMMA, unscaled_attention=True, normed_values=True, sees_pictures="window layers")

_BERT = Family(
    layer_norms=True, normed_after=True, both_ways=True, activation="gelu", ungated=True, eps=1e-12
)

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family(interleaved=True),
    "bitnet": Family(),
    "bitnet-25": Family(activation="relu2"),
    "bitnet-b1.58": Family(activation="relu2"),
    "llama4": Family(
        interleaved=True,
        full_attention_every=4,
        window=8192,
        chunked=True,
        unrotated_full=True,
        rotates_first=True,
        unit_norms=True,
        unnormed_experts=128,  # Maverick: LLM_TYPE_17B_128E in llama4.cpp
        tempered_full=(0.1, 8192, 1),
        renormalised=False,
        scoring="sigmoid",
        weighed_inputs=True,
    ),
    "qwen2": Family(),
    "qwen3": Family(),
    "mistral3": Family(interleaved=True),
    "phi3": Family(),
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma3n": replace(_GEMMA4, full_attention_every=5, sees_pictures="no layer", logit_cap=30.0),
    "granite": Family(interleaved=True),
    "arcee": Family(interleaved=True, activation="relu2", ungated=True),
    "maincoder": Family(interleaved=True, rotates_first=True),
    "pangu-embedded": Family(),
    "xverse": Family(interleaved=True),
    "smollm3": Family(interleaved=True, unrotated_every=4),
    "olmo2": Family(full_attention_every=4, plain_windows=True),
    "olmoe": Family(renormalised=False),
    "qwen3moe": Family(),
    "baichuan": Family(interleaved=True, distance_bias=8.0, biased_layers=40),
    "bloom": Family(layer_norms=True, activation="gelu", ungated=True, distance_bias=8.0),
    "mpt": Family(layer_norms=True, activation="gelu", ungated=True, unrotated_every=1),
    "refact": Family(distance_bias=8.0),
    "apertus": Family(ungated=True, curved=True),
    "codeshell": Family(layer_norms=True, activation="gelu", ungated=True),
    "deci": Family(interleaved=True, partial_layers=True),
    "granite_swa": Family(interleaved=True, full_attention_every=4),
    "mellum": Family(full_attention_every=4, plain_windows=True),
    "laguna": Family(
        full_attention_every=4,
        full_attention_first=True,
        plain_windows=True,
        softplus_gates=True,
        renormalised=False,
        scoring="sigmoid",
    ),
    "spark2_5": Family(activation="gelu", full_attention_every=4, plain_windows=True),
    "olmo": Family(interleaved=True, layer_norms=True, unweighted=True),
    "phimoe": Family(layer_norms=True),
    "qwen": Family(halved_width=True),
    "jais": Family(layer_norms=True, unrotated_every=1, scaled_by_size=True),
    "jais2": Family(layer_norms=True, activation="relu2", ungated=True),
    "muse-glimmer": Family(
        interleaved=True,
        full_attention_every=4,
        unrotated_full=True,
        plain_windows=True,
        normed_embedding=True,
        post_eps=1e-8,
        multiplied_logits=True,
    ),
    "afmoe": Family(
        full_attention_every=4,
        unrotated_every=4,
        scaled_embedding=True,
        renormalised=False,
        scoring="sigmoid",
    ),
    "gpt-oss": Family(activation="swiglu_oai", full_attention_every=2),
    "qwen3next": Family(attention_every=4, gated_attention=True, shares_in_turn=False),
    "qwen35": Family(attention_every=4, gated_attention=True, grid="in turn"),
    "qwen35moe": Family(attention_every=4, gated_attention=True, grid="in turn"),
    "qwen4exp": Family(attention_every=4, gated_attention=True, sigmoid_delta=True, grid="in turn"),
    "chatglm": Family(interleaved=True),
    "ernie4_5": Family(interleaved=True),
    "exaone": Family(),
    "exaone4": Family(full_attention_every=4, unrotated_full=True),
    "gemma": Family(activation="gelu", eps=1e-6, scaled_embedding=True),
    "gemma2": Family(
        activation="gelu",
        full_attention_every=2,
        eps=1e-6,
        scaled_embedding=True,
        window=4096,
        score_cap=50.0,
        logit_cap=30.0,
        scored_by_width=46,
    ),
    "glm4": Family(interleaved=True, grid="blocks"),
    "granitemoe": Family(interleaved=True),
    "hunyuan-dense": Family(rotates_first=True),
    "hunyuan-moe": Family(rotates_first=True),
    "hunyuan_vl": Family(rotates_first=True, grid="four blocks"),
    "internlm2": Family(interleaved=True),
    "minicpm": Family(interleaved=True, embedding_scale=12.0, depth_scale=1.4, base_width=256),
    "minicpm3": Family(embedding_scale=12.0, depth_scale=1.4, base_width=256, multiplied_logits=True),
    "qwen2moe": Family(renormalised=False),
    "qwen2vl": Family(grid="blocks"),
    "qwen3vl": Family(grid="in turn"),
    "qwen3vlmoe": Family(grid="in turn"),
    "seed_oss": Family(),
    "command-r": Family(interleaved=True, layer_norms=True, multiplied_logits=True),
    "cohere2": Family(
        interleaved=True,
        layer_norms=True,
        multiplied_logits=True,
        full_attention_every=4,
        unrotated_full=True,
    ),
    "cohere2moe": Family(
        interleaved=True,
        layer_norms=True,
        multiplied_logits=True,
        full_attention_every=4,
        full_attention_first=True,
        unrotated_full=True,
        rotates_dense=True,
        averages_shared=True,
        renormalised=False,
        scoring="sigmoid",
    ),
    "falcon": Family(layer_norms=True, activation="gelu", ungated=True),
    "falcon-h1": Family(recurrent="mamba", recurrent_beside=True),
    "gpt2": Family(layer_norms=True, activation="gelu", ungated=True, unrotated_every=1),
    "gptneox": Family(layer_norms=True, activation="gelu", ungated=True),
    "nemotron": Family(layer_norms=True, activation="relu2", ungated=True),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "orion": Family(layer_norms=True),
    "phi2": Family(layer_norms=True, activation="gelu", ungated=True),
    "stablelm": Family(layer_norms=True),
    "starcoder": Family(layer_norms=True, activation="gelu", ungated=True, unrotated_every=1),
    "starcoder2": Family(layer_norms=True, activation="gelu", ungated=True),
    "granitehybrid": Family(interleaved=True, recurrent="mamba"),
    "mamba": Family(recurrent="scan", lone_sublayers=True),
    "mamba2": Family(recurrent="mamba", lone_sublayers=True),
    "jamba": Family(recurrent="scan", unrotated_every=1, renormalised=False),
    "kimi-linear": Family(recurrent="keyed delta net", unrotated_every=1, scoring="sigmoid"),
    "bailingmoe3": Family(
        interleaved=True, recurrent="keyed delta net", renormalised=False, scoring="sigmoid"
    ),
    "plamo": Family(one_norm=True),
    "cogvlm": Family(),
    "plamo2": Family(recurrent="head scan"),
    "plamo3": Family(full_attention_every=8, plain_windows=True, window_base=1e4),
    "talkie": Family(unweighted=True, normed_embedding=True, multiplied_logits=True, adds_begin=True),
    "rwkv6": Family(layer_norms=True),
    "rwkv6qwen2": Family(),
    "rwkv7": Family(layer_norms=True),
    "arwkv7": Family(),
    "lfm2": Family(recurrent="short conv", full_attention_every=_NO_LAYER),
    "lfm2moe": Family(recurrent="short conv", full_attention_every=_NO_LAYER, scoring="sigmoid"),
    "bailingmoe": Family(interleaved=True, renormalised=False),
    "bailingmoe2": Family(renormalised=False, scoring="sigmoid"),
    "deepseek": Family(interleaved=True, renormalised=False),
    "deepseek2-ocr": Family(renormalised=False),
    "deepseek32": Family(interleaved=True, renormalised=False, biased_scoring="sigmoid", chooses_tokens=True),
    "glm-dsa": Family(interleaved=True, renormalised=False, scoring="sigmoid", chooses_tokens=True),
    "deepseek2": Family(interleaved=True, renormalised=False, biased_scoring="sigmoid"),
    "dbrx": Family(layer_norms=True),
    "smallthinker": Family(
        activation="relu",
        full_attention_every=4,
        full_attention_first=True,
        unrotated_full=True,
        routes_before=True,
    ),
    "dots1": Family(renormalised=False, scoring="sigmoid"),
    "ernie4_5-moe": Family(interleaved=True),
    "eurobert": Family(both_ways=True),
    "llama-embed": Family(interleaved=True, both_ways=True),
    "neo-bert": Family(interleaved=True, both_ways=True),
    "modern-bert": Family(
        layer_norms=True,
        both_ways=True,
        activation="gelu",
        full_attention_every=3,
        full_attention_first=True,
        plain_windows=True,
    ),
    "bert": replace(_BERT, unrotated_every=1),
    "nomic-bert": replace(_BERT, activation="silu", ungated=False),
    "nomic-bert-moe": replace(_BERT, renormalised=False),
    "jina-bert-v3": _BERT,
    "jina-bert-v2": replace(_BERT, ungated=False, distance_bias=8.0),
    "gemma-embedding": replace(_GEMMA3, both_ways=True),
    "exaone-moe": Family(
        full_attention_every=4, unrotated_full=True, window=128, renormalised=False, scoring="sigmoid"
    ),
    "minimax-m2": Family(scoring="sigmoid"),
    "minimax-m3": Family(activation="swiglu_oai", renormalised=False, scoring="sigmoid", chooses_tokens=True),
    "mimo2": Family(full_attention_every=_NO_LAYER, plain_windows=True, scoring="sigmoid"),
    "mistral4": Family(interleaved=True, renormalised=False, biased_scoring="sigmoid"),
    "glm4moe": Family(renormalised=False, scoring="sigmoid", grid="blocks"),
    "hy_v3": Family(renormalised=False, scoring="sigmoid"),
    "maple": Family(full_attention_every=4, unrotated_full=True, plain_windows=True),
    "step35": Family(
        full_attention_every=4,
        full_attention_first=True,
        plain_windows=True,
        halves_rotation=True,
        limits_silu=True,
        renormalised=False,
        scoring="sigmoid",
    ),
    "nanbeige": Family(interleaved=True),
    "openelm": Family(),
    "paddleocr": Family(grid="blocks"),
    "plm": Family(interleaved=True, activation="relu2", ungated=True),
}
