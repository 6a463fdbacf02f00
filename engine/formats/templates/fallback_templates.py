"""Chat templates for model files that have none, or one that does not work."""

from engine.formats.tokens.tokenizer import Tokenizer

_LLAMA_3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (
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
_HARMONY = (  # gpt-oss: its thinking is left out, <|channel|>analysis<|message|>
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n\n"
    "# Valid channels: analysis, commentary, final.<|end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_LLAMA_4 = (
    "{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>"
    "{% if can_think %}<think>\n{{ '\n</think>\n\n' if not enable_thinking }}{% endif %}{% endif %}"
)
_GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if can_think and not enable_thinking }}{% endif %}"
)
_COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "<|{{ {'system': 'SYSTEM', 'assistant': 'CHATBOT'}.get(m.role, 'USER') }}_TOKEN|>"
    "{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
_EXAONE = (
    "{% for m in messages %}[|{{ m.role }}|]{{ m.content | trim }}"
    "{{ '\n' if m.role == 'user' else '[|endofturn|]\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[|assistant|]{% endif %}"
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
    ({"<|im_start|>", "<|im_end|>"}, _CHATML),
    ({"<start_of_turn>", "<end_of_turn>"}, _GEMMA),
    ({"<|turn>", "<turn|>"}, _GEMMA_4),
    ({"<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"}, _GRANITE),
    ({"<|user|>", "<|assistant|>", "<|end|>"}, _PHI),
    ({"[INST]", "[/INST]"}, _MISTRAL),
    ({"<|start|>", "<|channel|>", "<|message|>", "<|return|>"}, _HARMONY),
    ({"<|header_start|>", "<|header_end|>", "<|eot|>"}, _LLAMA_4),
    ({"<｜User｜>", "<｜Assistant｜>"}, _DEEPSEEK),
    ({"[gMASK]", "<sop>", "<|user|>", "<|assistant|>"}, _GLM),
    ({"<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"}, _COMMAND_R),
    ({"[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"}, _EXAONE),
)


def fallback_template(architecture: str, tokenizer: Tokenizer) -> str:
    """The template of the model's family, as Jinja source."""
    if architecture in _BARE:
        return _NOTHING_AROUND
    for tokens, template in _FAMILIES:
        if tokens <= tokenizer.special_tokens.keys():
            return template
    return _LLAMA_2 if architecture == "llama" and tokenizer.sentencepiece else _PLAIN
