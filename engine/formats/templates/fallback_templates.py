"""Chat templates for model files that have none, or one that does not work."""

from engine.formats.tokens.tokenizer import Tokenizer

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
_GEMMA = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content | trim + '\n\n' %}{% else %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ ns.system + m.content | trim }}<end_of_turn>\n{% set ns.system = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA_4 = (
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
_MISTRAL = (
    "{% set ns = namespace(system='') %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST]{{ ns.system + m.content }}[/INST]{% set ns.system = '' %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_NOTHING_AROUND = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
_BARE = ("deepseek2-ocr",)
"""Architectures that were trained on a picture and a task, and nothing else."""
_FAMILIES = (  # the special tokens that tell a family
    ({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}, _LLAMA_3),
    ({"<|im_start|>", "<|im_end|>"}, CHATML),
    ({"<start_of_turn>", "<end_of_turn>"}, _GEMMA),
    ({"<|turn>", "<turn|>"}, _GEMMA_4),
    ({"<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"}, _GRANITE),
    ({"<|user|>", "<|assistant|>", "<|end|>"}, _PHI),
    ({"[INST]", "[/INST]"}, _MISTRAL),
)


def fallback_template(architecture: str, tokenizer: Tokenizer) -> str:
    """The template of the model's family, as Jinja source."""
    if architecture in _BARE:
        return _NOTHING_AROUND
    for tokens, template in _FAMILIES:
        if tokens <= tokenizer.special_tokens.keys():
            return template
    return _LLAMA_2 if architecture == "llama" and tokenizer.sentencepiece else _PLAIN
