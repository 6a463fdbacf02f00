"""Chat templates for model files that have none, or one that does not work."""

from __future__ import annotations

from engine.formats.tokenizer import Tokenizer

_LLAMA_3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if can_think and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_LLAMA_2 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ ns.system + m.content | trim }} [/INST]"
    "{% set ns.system = '' %}{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def fallback_template(architecture: str, tokenizer: Tokenizer) -> str:
    """The template of the model's family, as Jinja source. The special tokens tell the family."""
    known = tokenizer.special_tokens.keys()
    if {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= known:
        return _LLAMA_3
    if {"<|im_start|>", "<|im_end|>"} <= known:
        return CHATML
    return _LLAMA_2 if architecture == "llama" and tokenizer.sentencepiece else _PLAIN
