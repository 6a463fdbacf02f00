from types import SimpleNamespace

from engine.formats.fill_in import FillIn


def tokenizer(*names):
    encode = lambda text: [100 + ord(character) for character in text]
    special = {name: id for id, name in enumerate(names)}
    return SimpleNamespace(special_tokens=special, vocab_size=300, bos_id=9, add_bos=True, encode=encode)


def file(**ids):
    return SimpleNamespace(get=lambda key, _, default: ids.get(key.split(".")[-1], default))


def test_the_file_or_the_names_tell():
    told = file(fim_pre_token_id=5, fim_suf_token_id=6, fim_mid_token_id=7)
    assert FillIn.of(told, tokenizer()) == (5, 6, 7)
    qwen = tokenizer("<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>")
    assert FillIn.of(file(fim_pre_token_id=5), qwen) == (1, 2, 0)
    assert FillIn.of(file(), tokenizer("<|fim_prefix|>", "<fim_suffix>")) is None


def test_a_prompt():
    assert FillIn(5, 6, 7).prompt(tokenizer(), "a", "b") == (9, 5, 197, 6, 198, 7)
