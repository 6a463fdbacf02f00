import numpy as np
import pytest

from engine.errors import ContextFullError, UsageError
from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol.events import Chat, Message, RawText
from tests.generated_model import write


def test_a_template_that_does_not_work_is_told_before_the_first_prompt(tmp_path):
    for source, says in ((None, []), ("{% if %}", ["does not work"]), ("{{ 1 / 0 }}", ["does not work"])):
        with GGUF(write(tmp_path / "m.gguf", template=source)) as file:
            warnings = PromptEncoder(file).warnings
        assert [words in warning for words, warning in zip(says, warnings, strict=True)] == [True] * len(says)


def test_a_template_that_writes_nothing_is_not_taken_for_an_empty_message(tmp_path):
    with GGUF(write(tmp_path / "m.gguf", template="{# nothing #}")) as file:
        encoder = PromptEncoder(file)
    with pytest.raises(UsageError, match="template and vocabulary make no tokens") as told:
        encoder.encode(Chat(messages=(Message(role="user", content="Hi"),)))
    assert "another copy" in told.value.hint
    with pytest.raises(UsageError, match="prompt is empty"):
        encoder.encode(RawText(text=""))


def test_special_tokens_in_a_text(tmp_path):
    """They are so only if that is said, and a text that begins with BOS gets no second one."""
    with GGUF(write(tmp_path / "m.gguf")) as file:
        encoder = PromptEncoder(file)
    tokenizer = encoder.tokenizer
    tokenizer.add_bos, tokenizer.bos_id = True, tokenizer.special_tokens["<|im_start|>"]
    text = f"{tokenizer.text(tokenizer.bos_id)}the water<|im_end|>"
    plain, special = (encoder.encode(RawText(text=text, special=special)).ids for special in (False, True))
    assert special == [
        tokenizer.bos_id,
        *tokenizer.encode("the water"),
        tokenizer.special_tokens["<|im_end|>"],
    ]
    assert len(plain) > len(special) + 4


def test_a_conversation_that_cannot_fit_is_not_rendered(tmp_path, monkeypatch):
    with GGUF(write(tmp_path / "m.gguf")) as file:
        encoder = PromptEncoder(file)
    monkeypatch.setattr(encoder.template, "_renderer", None)
    long = Chat(messages=tuple(Message(role="user", content=f"water {i}") for i in range(60)))
    with pytest.raises(ContextFullError, match=r"has at least 1[2-9]. tokens and the context holds 100"):
        encoder.encode(long, most=100)


def test_a_prompt_that_is_certain_not_to_fit_is_not_tokenized(tmp_path, monkeypatch):
    with GGUF(write(tmp_path / "m.gguf")) as file:
        prompts = PromptEncoder(file)
    with GGUF(write(tmp_path / "endless.gguf", template="{{ 'water ' * 100000 }}")) as file:
        endless = PromptEncoder(file)
    fitting = prompts.encode(RawText(text="the water " * 50))
    assert prompts.encode(RawText(text="the water " * 50), most=len(fitting.ids)) == fitting
    monkeypatch.setattr(prompts.tokenizer, "merge", None)
    monkeypatch.setattr(endless.tokenizer, "merge", None)
    for encoder, prompt in (
        (prompts, RawText(text="the water " * 1000)),
        (prompts, Chat(messages=(Message(role="user", content="größe " * 1000),))),
        (endless, Chat(messages=(Message(role="user", content="Hi"),))),
    ):
        with pytest.raises(ContextFullError, match=r"has at least [\d,]+ tokens and the context holds 100\."):
            encoder.encode(prompt, most=100)


def test_a_text_whose_beginning_does_not_fit_is_not_tokenized_to_its_end(tmp_path, monkeypatch):
    with GGUF(write(tmp_path / "m.gguf")) as file:
        tokenizer = PromptEncoder(file).tokenizer
    monkeypatch.setattr(tokenizer, "_fewest", lambda text: 0)  # it knows little of texts without spaces
    merge, sizes = tokenizer.merge, []
    monkeypatch.setattr(tokenizer, "merge", lambda words: sizes.extend(map(len, words)) or merge(words))
    with pytest.raises(ContextFullError, match=r"has over 100 tokens, and the context holds no more\."):
        tokenizer.encode("qzxj" * 100_000, most=100)
    assert max(sizes) < 10_000
    assert len(tokenizer.encode("qzxj" * 1000, most=10_000)) > 100


def test_words_and_changes_tell_that_a_text_does_not_fit_where_its_length_does_not(tmp_path):
    with GGUF(write(tmp_path / "m.gguf")) as file:
        tokenizer = PromptEncoder(file).tokenizer
    tokenizer._most_in_a_token = np.array([128, 2, 30])
    texts = "a b" * 20, "a" * 256, "  ab" * 100
    assert [tokenizer._fewest([text]) for text in texts] == [11, 2, 50]
    assert tokenizer._fewest([texts[0], "", *texts]) == 11 + 11 + 2 + 50
