"""What a GGUF file holds that is no language model: an adapter, an encoder, or figures for quantizing."""

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, printable

_OTHERS = {  # general.type (GGUFType in gguf-py of llama.cpp), or the architecture
    "adapter": ("a LoRA adapter", "Give the model that it changes, and name the adapter with --lora FILE."),
    "mmproj": (
        "an encoder of pictures (mmproj)",
        "Give the model's own file; the encoder is found beside it, or named with --mmproj.",
    ),
    "imatrix": ("an importance matrix, which is needed only to quantize", "Choose the model's own file."),
    "controlvector": ("a control vector", "orin-chat applies none. Choose a model file."),
}
_ARCHITECTURES = {"clip": "mmproj", "controlvector": "controlvector"}
"""Older files have no general.type."""

_OTHER_WORK = {
    "makes all tokens of a reply at once (diffusion)": ("dream", "llada", "llada-moe", "rnd1"),
    "makes pictures or videos": (
        "flux", "sd1", "sd3", "sdxl", "wan", "ltxv", "hyvid", "hidream", "lumina2", "aura", "cosmos", "qwen_image",
        "pig",
    ),
    "reads a whole text before it writes another one, or makes its embedding (T5)": ("t5", "t5encoder"),
    "hears or makes sounds": ("whisper", "wavtokenizer-dec", "qwen3tts", "pockettts", "tts-outetts"),
    "guesses tokens of another model, and answers nothing itself": ("eagle3", "dflash"),
}  # fmt: skip
"""What models do that answer in another way than all others, by their architectures: src/llama-arch.cpp of llama.cpp,
and files of programs that make pictures."""

ASSISTANT = "gemma4-assistant"
"""Drafters of a model, which do not answer alone (`engine.description.assistant`)."""


def check_is_model(file: GGUF) -> None:
    """Raises ModelFileError for a file that says that it is something else than a model."""
    architecture, name = file.get("general.architecture", str, ""), printable(file.path.name)
    kind = _ARCHITECTURES.get(architecture) or file.get("general.type", str, "")
    if "adapter.type" in file.metadata:
        kind = "adapter"
    if kind in _OTHERS:
        what, hint = _OTHERS[kind]
        raise ModelFileError(f"{name} is {what}, not a language model.", hint)
    if architecture == ASSISTANT:
        raise ModelFileError(
            f"{name} guesses tokens of a Gemma 4 model, and answers nothing itself.",
            f"Choose the model it was made for, with --draft {name} beside it.",
        )


def check_runs(architecture: str, model: str) -> None:
    """Raises ModelFileError for an architecture that answers in another way than all others; the message calls the
    model `model`."""
    for work, architectures in _OTHER_WORK.items():
        if architecture in architectures:
            raise ModelFileError(
                f"{model} is of the architecture {architecture}, which {work}. orin-chat does not run it.",
                "Choose a model that makes one token after the other.",
            )
