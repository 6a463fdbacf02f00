"""What belongs to a family of models: its vocabulary, its chat template, its ends of a reply, its thinking."""

import re
from datetime import datetime
from functools import cache

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import think_splitter
from engine.formats.templates.template import ChatTemplate
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tokens.vocabulary import StreamDecoder
from engine.protocol.events import Chat, Message
from tests.formats.vocabularies import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    decode,
    names,
    of_shape,
    sentencepiece,
    write,
)
from tests.paths import SHARED
from tests.thorough import rarely

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared folder with real vocabularies")


@cache
def vocabulary(name: str) -> Tokenizer:
    return Tokenizer(GGUF(SHARED / f"models/vocab/{name}.gguf"))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """(template, tokenizer) of a small model of a family; each is made once."""
    folder, made = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> tuple[ChatTemplate, Tokenizer]:
        if name not in made:
            file = of_shape(f"tiny-{name}", folder / name)
            tokenizer = Tokenizer(file)
            template = ChatTemplate.from_gguf(file, tokenizer)
            template.now = lambda: datetime(2025, 7, 26, 12)
            made[name] = template, tokenizer
        return made[name]

    return get


# --- tokenizers -----------------------------------------------------------------------------------------

LLAMA_CPP = {  # from models/ggml-vocab-*.gguf.inp and .out in llama.cpp
    ("qwen35", "re\u0301sume\u0301"): [265, 53839, 31323, 53839],
    ("qwen35", "Vie\u1ebft Nam"): [53, 645, 51580, 29974],
    ("qwen35", "    Hello\n    Hello"): [262, 21927, 198, 262, 21927],
    ("refact", "ied 4 ½ months"): [4833, 225, 38, 225, 143, 140, 17723],
    ("refact", "333"): [37, 37, 37],
    ("phi-3", " this is 🦙.cpp"): [29871, 445, 338, 29871, 243, 162, 169, 156, 29889, 8223],
    ("phi-3", "    Hello\n    Hello"): [268, 15043, 13, 1678, 15043],
    ("phi-3", "Cửa Việt"): [315, 228, 190, 176, 29874, 10630, 30529, 29873],
    ("gemma-4", " this is 🦙.cpp"): [672, 563, 236743, 478, 397, 404, 391, 236761, 12362],
    ("gemma-4", "    Hello\n    Hello"): [140, 9259, 107, 140, 9259],
    ("gemma-4", "\n\n\n"): [109],
    ("gemma-4", "កាន់តែពិសេសអាចខលចេញ"): [234889, 63031, 219876, 66212, 239077, 237907, 144494],
}


@needs_shared
@pytest.mark.parametrize(  # Gemma 4's vocabulary is the largest; the oracles below have a small one of its kind
    ("name", "text"), [rarely(*text) if text[0] == "gemma-4" else text for text in LLAMA_CPP]
)
def test_texts_of_families_have_the_ids_of_llama_cpp(name, text):
    t = vocabulary(name)
    assert t.encode(text) == LLAMA_CPP[name, text] and decode(t, LLAMA_CPP[name, text]) == text


ENDS = {  # the ends that make_model.py's vocabularies have besides those of Llama 3's tokens, which stand in
    "gemma3": {"<end_of_turn>", "<eos>"},
    "gemma4": {"<turn|>", "<eos>"},
    "gpt-oss": {"<|return|>", "<|call|>", "<|endoftext|>"},
    "granite": {"<|end_of_text|>"},
    "mistral3": {"</s>"},
    "olmoe": {"<|endoftext|>"},
    "phi3": {"<|end|>", "<|endoftext|>", "</s>"},
    "qwen35": {"<|im_end|>", "<|endoftext|>"},
    "qwen3moe": {"<|im_end|>", "<|endoftext|>"},
    "smollm3": {"<|eot_id|>", "<|end_of_text|>"},
}


# a chat's reply has none of these
OTHER_ENDS = {"<|tool_response>", "<fim_pad>", "<reponame>"}


# others have tokens of their kind
MORE = "mistral3", "qwen3moe", "smollm3"


@needs_shared
@pytest.mark.parametrize("name", [rarely(name) if name in MORE else name for name in ENDS])
def test_the_tokens_that_end_a_reply(family, name):
    _, t = family(name)
    stand_in = {"<|eot_id|>", "<|end_of_text|>"}
    assert ENDS[name] <= {t.text(id) for id in t.eos_ids} <= ENDS[name] | OTHER_ENDS | stand_in
    assert not t.warning


@needs_shared
@pytest.mark.parametrize("name", ENDS)
def test_prompts_of_the_oracles_have_the_ids_of_llama_cpp(family, name):
    _, t = family(name)
    oracle = np.load(SHARED / f"oracle/arch/tiny-{name}-F32.npz")
    for i in range(2):
        ids = oracle[f"tokens{i}"].tolist()  # those that a prompt begins with
        assert t.encode(str(oracle[f"text{i}"]), add_special=True)[: len(ids)] == ids


def test_gemma_and_its_html(tmp_path):
    """`</s>` ends a reply of other models."""
    special = (("<eos>", CONTROL), ("</s>", USER_DEFINED), ("<table>", USER_DEFINED), ("  ", USER_DEFINED))
    special += (("<start_of_image>", USER_DEFINED),)
    pieces = [("<unk>", UNKNOWN), ("<bos>", CONTROL), (SPACE, NORMAL), ("a", NORMAL), ("<", NORMAL)]
    t = Tokenizer(write(tmp_path / "v", "llama", [*pieces, *special], add_space_prefix=False, eos_token_id=5))
    assert {t.text(id) for id in t.eos_ids} == {"<eos>"}
    assert names(t, "<table>  a</s> a") == ["<table>", "  ", "a", "</s>", SPACE, "a"]
    assert "<start_of_image>" not in names(t, "<start_of_image>")
    ids = t.encode_segments([("<ta", False), ("ble>", True), ("a ", True), (" a", False)])
    assert [t.text(id) for id in ids] == ["<table>", "a", "  ", "a"]  # a text may come in parts
    assert decode(t, ids) == "<table>a  a"


def test_phi_takes_the_white_space_after_a_mark(tmp_path):
    special = tuple(
        (text, CONTROL) for text in ("<|assistant|>", "<|end|>", "<|placeholder1|>", "<|endoftext|>")
    )
    t = Tokenizer(sentencepiece(tmp_path / "v", {SPACE: -1.0, "a": -2.0, SPACE + "a": -3.0}, special=special))
    assert names(t, "<|assistant|>\n a<|end|>\n", special=True) == ["<|assistant|>", SPACE + "a", "<|end|>"]
    assert names(t, "<|endoftext|>\na", special=True)[:3] == ["<|endoftext|>", SPACE, "<0x0A>"]


# --- chat templates -------------------------------------------------------------------------------------

CHAT = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Yo", thinking="Hm"),
    Message(role="user", content="Bye <|end|>"),
]
TEXTS = {  # of prompts that ask for thinking; "…" stands for what is left out
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n"
    "<start_of_turn>user\nBye <|end|><end_of_turn>\n<start_of_turn>model\n",
    "gemma4": "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nYo<turn|>\n"
    "<|turn>user\nBye <|end|><turn|>\n<|turn>model\n",
    "gpt-oss": "<|start|>system<|message|>You are ChatGPT,…Current date: 2025-07-26\n\nReasoning: medium\n\n…<|end|>"
    "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>Hi<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yo<|end|><|start|>user<|message|>Bye <|end|><|end|>"
    "<|start|>assistant",
    "granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi"
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Yo<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"
    "Bye <|end|><|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "mistral3": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yo</s>[INST]Bye <|end|>[/INST]",
    "olmoe": "<|endoftext|><|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\nYo<|endoftext|>\n<|user|>\n"
    "Bye <|end|>\n<|assistant|>\n",
    "phi3": "<|system|> Be brief.<|end|><|user|> Hi<|end|><|assistant|> Yo<|end|>"
    "<|user|> Bye <|end|><|end|><|assistant|>",
    "qwen35": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo"
    "<|im_end|>\n<|im_start|>user\nBye <|end|><|im_end|>\n<|im_start|>assistant\n<think>\n",
    "smollm3": "<|begin_of_text|><|im_start|>system\n## Metadata\n\n…Reasoning Mode: /think\n\n…Be brief.\n\n"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo"
    "<|im_end|>\n<|im_start|>user\nBye <|end|><|im_end|>\n<|im_start|>assistant\n",
}


@needs_shared
@pytest.mark.parametrize("name", TEXTS)
def test_templates_render(family, name):
    template, t = family(name)
    prompt = template.encode(CHAT)
    text = b"".join(map(t.piece, prompt.ids)).decode().replace(SPACE, " ")  # the small gemma4 lacks it
    assert re.fullmatch(".*".join(map(re.escape, TEXTS[name].split("…"))), text, re.DOTALL)
    assert not template.warning and prompt.opens_thinking == (name == "qwen35")
    typed = template.encode([*CHAT[:3], Message(role="user", content="Bye")])
    special = t.special_tokens.values()
    assert [id for id in prompt.ids if id in special] == [id for id in typed.ids if id in special]


QUIET = {  # how a prompt ends that asks for no thinking
    "gemma4": "<|turn>model\n<|channel>thought\n<channel|>",
    "qwen35": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "smollm3": "<|im_start|>assistant\n<think>\n\n</think>\n",
    "granite": "<|start_of_role|>assistant<|end_of_role|>",
    "gpt-oss": "<|start|>assistant",
}


@needs_shared
@pytest.mark.parametrize("name", QUIET)
def test_a_family_that_thinks_is_asked_not_to(family, name):
    template, t = family(name)
    prompt = template.encode(CHAT[1:], think=False)
    text = b"".join(map(t.piece, prompt.ids)).decode()
    assert template.thinks and text.endswith(QUIET[name]) and not prompt.opens_thinking
    assert ("Reasoning: low" in text) == (name == "gpt-oss")
    assert "<think></think>" not in text  # Granite's instructions


@needs_shared
@pytest.mark.parametrize("name", TEXTS)
def test_only_gpt_oss_takes_an_effort(family, name):
    template, t = family(name)
    assert template.takes_effort == (name == "gpt-oss")
    text = b"".join(map(t.piece, template.encode(CHAT, effort="high").ids)).decode()
    assert ("Reasoning: high" in text) == template.takes_effort


REPLIES = {  # as the model writes them: (thinking, answer) is always ("Hm", "Yo")
    "gemma4": "<|channel>thought\nHm\n<channel|>Yo",
    "gpt-oss": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yo",
    "granite": "<think>Hm</think>\n<response>Yo</response>",
    "mistral3": "[THINK]Hm[/THINK]Yo",
    "smollm3": "<think>\nHm\n</think>\n\nYo",
}


@needs_shared
@pytest.mark.parametrize("name", REPLIES)
def test_thinking_is_told_from_the_answer(family, name):
    template, t = family(name)
    prompt = template.encode(CHAT)
    splitter, stream = think_splitter(Chat(messages=tuple(CHAT)), prompt), StreamDecoder(t)
    texts = {True: "", False: ""}
    for id in t.encode(REPLIES[name], special=True):
        thinking, text = splitter.feed(stream.feed(id), id)
        texts[thinking] += text
    thinking, text = splitter.flush()
    texts[thinking] += text
    assert (texts[True].strip(), texts[False]) == ("Hm", "Yo")


@needs_shared
@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_was_stopped_is_written_as_the_model_writes_it(family, name):
    template, t = family(name)

    def written(**reply: str) -> str:
        start, prompt = template.encode(CHAT[:2]), [*CHAT[:2], Message(role="assistant", **reply)]
        ids = template.encode(prompt).ids
        assert ids[: len(start.ids)] == start.ids
        return b"".join(map(t.piece, ids[len(start.ids) :])).decode()

    whole = REPLIES[name].removesuffix("</response>").replace("</think>\n<r", "</think><r")
    assert written(content="Yo", thinking="Hm") == whole
    assert written(content="", thinking="Hm") == whole[: whole.index("Hm") + 2]
    assert written(content="Yo") == {"gpt-oss": "<|channel|>final<|message|>Yo"}.get(name, "Yo")
