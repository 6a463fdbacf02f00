from types import SimpleNamespace

from engine.formats.templates.fill_in import FillIn


def tokenizer(*names):
    encode = lambda text: [100 + ord(character) for character in text]
    special = {name: id for id, name in enumerate(names)}
    return SimpleNamespace(special_tokens=special, vocab_size=300, bos_id=9, add_bos=True, encode=encode)


def file(**ids):
    return SimpleNamespace(get=lambda key, _, default: ids.get(key.split(".")[-1], default))


def test_the_file_or_the_names_tell():
    told = file(fim_pre_token_id=5, fim_suf_token_id=6, fim_mid_token_id=7)
    assert FillIn.of(told, tokenizer()) == (5, 6, 7, None, None, {5, 6, 7})
    qwen = tokenizer("<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>")
    assert FillIn.of(file(fim_pre_token_id=5), qwen)[:3] == (1, 2, 0)
    coder = tokenizer("<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|file_sep|>", "<|fim_pad|>")
    assert FillIn.of(file(fim_rep_token_id=7), coder) == (1, 2, 0, 7, 3, {0, 1, 2, 3, 4, 7})
    assert FillIn.of(file(), tokenizer("<|fim_prefix|>", "<fim_suffix>")) is None


def test_a_prompt():
    assert FillIn(5, 6, 7).prompt(tokenizer(), "a", "b", "c") == (9, 5, 197, 6, 198, 7, 199)


def test_a_prompt_with_other_files():
    written = lambda ids: "".join(chr(id - 100) if id > 100 else f"<{id}>" for id in ids)
    files, coder = [("a.py", "x"), ("b.py", "y")], FillIn(5, 6, 7, 3, 4)
    whole = "<9><3>project\n<4>a.py\nx<4>b.py\ny<4>current\n<5>first<6>last<7>."
    assert written(coder.prompt(tokenizer(), "first", "last", ".", files)) == whole
    assert (
        written(FillIn(5, 6, 7).prompt(tokenizer(), "", "", "", files))
        == "<9>a.py\nx\n\nb.py\ny\n\n<5><6><7>"
    )


def test_what_does_not_fit_is_left_out():
    written = lambda room: "".join(
        chr(id - 100) if id > 100 else f"<{id}>"
        for id in FillIn(5, 6, 7, 3, 4).prompt(tokenizer(), "a" * 20, "b" * 20, ".", [("c", "d")], room)
    )
    assert written(52) == f"<9>urrent\n<5>{'a' * 20}<6>{'b' * 20}<7>."
    assert written(45) == f"<9><5>{'a' * 20}<6>{'b' * 20}<7>."
    assert written(35) == f"<9><5>{'a' * 20}<6>{'b' * 10}<7>."
    assert written(21) == f"<9><5>{'a' * 12}<6>{'b' * 4}<7>."
    assert written(0) == "<9><5><6><7>."
