"""Files of Ollama's converter are read as those of llama.cpp, which have other names."""

import re

import pytest

from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.formats.ollama_names import usual_names
from tests.description.test_architectures import DIM, path_of, read

__all__ = ["path_of"]


@pytest.mark.parametrize(
    ("usual", "theirs", "tensors", "unsaid"),
    [
        (
            "gpt-oss",
            "gptoss",
            {
                "attn_output.": "attn_out.",
                "attn_sinks.weight": "attn_sinks",
                "post_attention_norm": "ffn_norm",
            },
            ("expert_feed_forward_length", "rope.scaling.type"),
        ),
        ("glm4", "glmocr", {"attn_output.": "attn_out.", "post_ffw_norm": "post_ffn_norm"}, ()),
        ("deepseek2-ocr", "deepseekocr", {}, ("expert_feed_forward_length",)),
        ("qwen2vl", "qwen25vl", {}, ()),
        (
            "nemotron_h_moe-narrow",
            "nemotron_h_omni",
            {"latent_down": "latent_in", "latent_up": "latent_out"},
            ("moe_latent_size",),
        ),
        ("olmo2", "olmo3", {}, ()),
    ],
)
def test_other_names_of_ollama(path_of, usual, theirs, tensors, unsaid):
    with GGUF(path_of(usual)) as file:
        expected, usual = read_spec(file), file.metadata["general.architecture"]

        def renamed(name):
            for text, other in tensors.items():
                name = name.replace(text, other)
            return name

        keys = {key: v for key, v in file.metadata.items() if key.removeprefix(f"{usual}.") not in unsaid}
        keys = {re.sub(f"^{usual}\\.", f"{theirs}.", key): v for key, v in keys.items()}
        keys["general.architecture"] = theirs
        changed = {renamed(name): info for name, info in file.tensors.items()}
        file.metadata, file.tensors = usual_names(keys, changed)
        assert read_spec(file) == expected


def test_sizes_of_heads_in_a_file_of_ollama(path_of):
    with GGUF(path_of("deepseek2")) as file:
        expected = read_spec(file)
        keys = {key.replace("deepseek2.", "glm4moelite."): value for key, value in file.metadata.items()}
        for x in "key", "value":
            whole, head = f"glm4moelite.attention.{x}_length", f"glm4moelite.attention.{x}_length_mla"
            keys[whole], keys[head] = keys[head], keys[whole]
        keys["general.architecture"] = "glm4moelite"
        file.metadata, file.tensors = usual_names(keys, file.tensors)
        assert read_spec(file) == expected


def test_the_width_of_feed_forward_layers_is_that_of_their_matrices(path_of):
    assert read(path_of("lfm2"), lfm2__feed_forward_length=999) == read(path_of("lfm2"))


def test_a_vocabulary_of_ollama_is_cut_to_what_has_embeddings_of_layers(path_of):
    spec = read(path_of("gemma3n"))
    assert read(path_of("gemma3n"), {"token_embd.weight": (spec.vocab + 9, DIM)}) == spec
