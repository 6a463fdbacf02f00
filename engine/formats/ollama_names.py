"""Files that Ollama's converter wrote before it took the names of llama.cpp: the same models under other names.

Source: llama/compat/llama-ollama-compat.cpp of https://github.com/ollama/ollama, which changes these names before
llama.cpp reads such a file.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from engine.formats.string_array import StringArray

Metadata = Mapping[str, object]
_ARCHITECTURE = "general.architecture"
_TOKENIZER, _PRE, _MERGES, _CHARACTERS = (
    f"tokenizer.ggml.{name}" for name in ("model", "pre", "merges", "precompiled_charsmap")
)


class _Tensor(Protocol):
    """A data class with these fields."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def n_bytes(self) -> int: ...


_T = TypeVar("_T", bound=_Tensor)


@dataclass(frozen=True)
class _Names:
    """What files of an architecture say in other words. `architecture`: what llama.cpp calls it; "" for the same.
    `tensors`: patterns of names, and what takes the place of what they match. `keys`: those of the architecture, each
    with the usual one, which counts if the file has both. `unsaid`: values of keys that a file may not have; those that
    are `left_out` are wrong. `pretokenizer` counts whatever the file says, `unnamed_pretokenizer` if it names none, and
    `tokenizer` if it says "llama" of a vocabulary that has merges. `experts`: a matrix that has a row for each element
    of an expert, where the file does not say how many. `widths`: one that has a row for each element of feed-forward
    layers, whatever the file says. `cut`: a table of embeddings, and one that has as many rows as count."""

    architecture: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    unsaid: Mapping[str, object] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    pretokenizer: str = ""
    unnamed_pretokenizer: str = ""
    tokenizer: str = ""
    experts: str = ""
    widths: str = ""
    cut: tuple[str, str] = ("", "")


_SECTIONS = {"rope.mrope_section": "rope.dimension_sections"}
_LATENTS = {r"\.ffn_latent_in\.": ".ffn_latent_down.", r"\.ffn_latent_out\.": ".ffn_latent_up."}
_BASES = {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"}
_EMBEDDING_GEMMA = _Names(
    "gemma-embedding",
    tensors={r"^dense\.0\.": "dense_2.", r"^dense\.1\.": "dense_3.", r"^norm\.": "output_norm."},
    keys=_BASES,
    left_out=("attention.causal", "attention.sliding_window_pattern"),
)
"""Of the architecture gemma3, with a projection that chat models do not have."""
_DELTA = _Names(tensors={r"\.ssm_dt$": ".ssm_dt.bias"})

_NAMES: Mapping[str, _Names] = {
    "bert": _Names(),
    "deepseekocr": _Names(
        "deepseek2-ocr",
        unsaid={"attention.layer_norm_rms_epsilon": 1e-6},
        experts="blk.1.ffn_gate_exps.weight",
    ),
    "gemma3": _Names(keys=_BASES),
    "gemma3n": _Names(
        keys={"rope.freq_base_local": "rope.freq_base_swa"},
        cut=("token_embd.weight", "per_layer_token_embd.weight"),
    ),
    "gemma4": _Names(
        tensors={r"\.ffn_gate_inp\.per_expert_scale$": ".ffn_down_exps.scale"}, tokenizer="gemma4"
    ),
    "glm4moelite": _Names(
        "deepseek2",
        # The sizes of heads stand where others have those of what is cached, and the other way round.
        left_out=("attention.key_length_mla", "attention.value_length_mla"),
        pretokenizer="glm4",
    ),
    "glmocr": _Names(
        "glm4",
        tensors={
            r"\.attn_out\.": ".attn_output.",
            r"\.post_attn_norm\.": ".post_attention_norm.",
            r"\.post_ffn_norm\.": ".post_ffw_norm.",
        },
        keys=_SECTIONS,
        pretokenizer="chatglm-bpe",
    ),
    "gptoss": _Names(
        "gpt-oss",
        tensors={
            r"\.attn_out\.": ".attn_output.",
            r"\.attn_sinks$": ".attn_sinks.weight",
            r"\.ffn_norm\.": ".post_attention_norm.",
        },
        unsaid={"rope.scaling.type": "yarn"},
        pretokenizer="gpt-4o",
        experts="blk.0.ffn_gate_exps.weight",
    ),
    "laguna": _Names(
        tensors={r"\.attn_g\.": ".attn_gate."},
        keys={
            "rope.swa.dimension_count": "rope.dimension_count_swa",
            "rope.swa.freq_base": "rope.freq_base_swa",
        },
    ),
    "lfm2": _Names(widths="blk.0.ffn_gate.weight"),
    "mistral3": _Names(
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
        unnamed_pretokenizer="tekken",
    ),
    "nemotron_h_moe": _Names(tensors=_LATENTS),
    "nemotron_h_omni": _Names("nemotron_h_moe", tensors=_LATENTS),
    "olmo3": _Names("olmo2"),
    "qwen25vl": _Names("qwen2vl", keys=_SECTIONS),
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "qwen3next": _DELTA,
}


def usual_names(metadata: Metadata, tensors: Mapping[str, _T]) -> tuple[Metadata, Mapping[str, _T]]:
    """What a file has, under the names of llama.cpp."""
    architecture = _text(metadata, _ARCHITECTURE)
    names = _NAMES.get(architecture)
    if architecture == "gemma3" and "dense.0.weight" in tensors:
        names = _EMBEDDING_GEMMA
    if not names:
        return metadata, tensors
    usual = names.architecture or architecture
    found: dict[str, object] = {f"{usual}.{key}": value for key, value in names.unsaid.items()}
    if (experts := tensors.get(names.experts)) and len(experts.shape) == 3:
        found[f"{usual}.expert_feed_forward_length"] = experts.shape[-2]
    of_model = f"{architecture}."
    own = {key.removeprefix(of_model): key for key in metadata if key.startswith(of_model)}
    own = {key: full for key, full in own.items() if key not in names.left_out}
    found |= {f"{usual}.{names.keys[key]}": metadata[own[key]] for key in own if key in names.keys}
    found |= {f"{usual}.{key}": metadata[full] for key, full in own.items()}
    found |= {key: value for key, value in metadata.items() if not key.startswith(of_model)}
    if (gate := tensors.get(names.widths)) and len(gate.shape) == 2:
        found[f"{usual}.feed_forward_length"] = gate.shape[0]
    found[_ARCHITECTURE] = usual
    if names.pretokenizer:
        found[_PRE] = names.pretokenizer
    elif names.unnamed_pretokenizer and _text(metadata, _PRE) in ("", "default"):
        found[_PRE] = names.unnamed_pretokenizer
    if names.tokenizer and _text(metadata, _TOKENIZER) == "llama" and _MERGES in found:
        found[_TOKENIZER] = names.tokenizer
    found |= _decoded(metadata)
    return found, _cut(names.cut, _renamed(names.tensors, tensors))


def _text(metadata: Metadata, key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _decoded(metadata: Metadata) -> Metadata:
    """The table of characters of a vocabulary, which is base64, a string for each of its letters."""
    table = metadata.get(_CHARACTERS)
    if not isinstance(table, StringArray):
        return {}
    with suppress(ValueError):
        return {_CHARACTERS: np.frombuffer(b64decode(b"".join(table.raws())), np.uint8)}
    return {}


def _renamed(patterns: Mapping[str, str], tensors: Mapping[str, _T]) -> Mapping[str, _T]:
    """The tensors by their usual names."""

    def named(name: str) -> str:
        for pattern, usual in patterns.items():
            name = re.sub(pattern, usual, name)
        return name

    if not patterns:
        return tensors
    renamed = (replace(tensor, name=named(name)) for name, tensor in tensors.items())
    return {tensor.name: tensor for tensor in renamed}


def _cut(tables: tuple[str, str], tensors: Mapping[str, _T]) -> Mapping[str, _T]:
    long, short = map(tensors.get, tables)
    if not (long and short and len(long.shape) == 2 and short.shape[0] < long.shape[0]):
        return tensors
    rows, cols = short.shape[0], long.shape[1]
    cut = replace(long, shape=(rows, cols), n_bytes=long.n_bytes // long.shape[0] * rows)
    return {**tensors, long.name: cut}
