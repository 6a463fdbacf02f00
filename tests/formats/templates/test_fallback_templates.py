"""Chat templates for files that have none."""

import pytest

from engine.formats.gguf import GGUF
from engine.formats.templates.template import ChatTemplate
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Message
from tests.formats.vocabularies import CONTROL, USER_DEFINED, byte_level, sentencepiece, spelled_out

TURNS = [
    Message(role=role, content=text)
    for role, text in [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
]
THINKS = (
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
)


def family(gguf: GGUF, **options) -> str:
    template = ChatTemplate.from_gguf(gguf, Tokenizer(gguf))
    assert "no chat template" in template.warning
    return spelled_out(template._tokenizer, template.encode(TURNS, **options).ids)


def test_formats_of_families(tmp_path):
    llama3 = tuple((f"<|{name}|>", CONTROL) for name in ("start_header_id", "end_header_id", "eot_id"))
    turn = lambda role, text: f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"
    assert family(byte_level(tmp_path / "llama3", special=llama3)) == "<|eot_id|>".join(
        turn(*t)
        for t in [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V"), ("assistant", "")]
    )
    turns = "".join(
        f"<|im_start|>{r}\n{t}<|im_end|>\n"
        for r, t in [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    )
    qwen = byte_level(tmp_path / "qwen", special=THINKS, architecture="qwen3")
    assert family(qwen) == turns + "<|im_start|>assistant\n"
    assert family(qwen, think=False) == turns + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert ChatTemplate.from_gguf(qwen, Tokenizer(qwen)).thinks

    pieces = {c: -float(i) for i, c in enumerate("▁[]INST/<>SYUAV\n")}
    assert family(sentencepiece(tmp_path / "llama2", pieces)).replace(" ", "") == (
        "<s>[INST]<<SYS>>\nS\n<</SYS>>\n\nU[/INST]A</s><s>[INST]V[/INST]"
    )
    distilled = (*THINKS[2:], ("<｜User｜>", CONTROL), ("<｜Assistant｜>", CONTROL))
    deepseek = byte_level(tmp_path / "deepseek", special=distilled)
    assert family(deepseek).endswith("<｜User｜>V<｜Assistant｜><think>\n")
    assert family(deepseek, think=False).endswith("<｜User｜>V<｜Assistant｜><think>\n\n</think>\n\n")

    plain = byte_level(tmp_path / "plain", architecture="gpt2")
    assert family(plain) == "System: S\n\nUser: U\n\nAssistant: A\n\nUser: V\n\nAssistant:"
    assert family(byte_level(tmp_path / "ocr", architecture="deepseek2-ocr")).endswith("SUAV")


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (
            ["<start_of_turn>", "<end_of_turn>"],
            "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            ["<|turn>", "<turn|>"],
            "<|turn>system\nS<turn|>\n<|turn>user\nU<turn|>\n<|turn>model\nA<turn|>\n<|turn>user\nV<turn|>\n"
            "<|turn>model\n",
        ),
        (
            ["<|user|>", "<|assistant|>", "<|end|>"],
            "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
        ),
        (
            ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
            "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n"
            "<|start_of_role|>assistant<|end_of_role|>A<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>V"
            "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        ),
        (["[INST]", "[/INST]"], "[INST]S\n\nU[/INST]A[INST]V[/INST]"),
        (
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
            "<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, commentary, final.<|end|>"
            "<|start|>developer<|message|># Instructions\n\nS<|end|><|start|>user<|message|>U<|end|>"
            "<|start|>assistant<|channel|>final<|message|>A<|end|><|start|>user<|message|>V<|end|><|start|>assistant",
        ),
        (
            ["<|header_start|>", "<|header_end|>", "<|eot|>"],
            "<|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\nU<|eot|>"
            "<|header_start|>assistant<|header_end|>\n\nA<|eot|><|header_start|>user<|header_end|>\n\nV<|eot|>"
            "<|header_start|>assistant<|header_end|>\n\n",
        ),
        (["<｜User｜>", "<｜Assistant｜>"], "S\n\n<｜User｜>U<｜Assistant｜>A<｜User｜>V<｜Assistant｜>"),
        (
            ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>"],
            "[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\nA<|user|>\nV<|assistant|>",
        ),
        (
            ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"],
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>U"
            "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>V<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        (
            ["[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"],
            "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|user|]V\n[|assistant|]",
        ),
    ],
)
def test_special_tokens_tell_the_format(tmp_path, marks, text):
    assert family(byte_level(tmp_path / "v", special=tuple((mark, CONTROL) for mark in marks))) == text
