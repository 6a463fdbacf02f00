import struct
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.formats.tokens.pretokenizers import PRETOKENIZERS
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tokens.vocabulary import StreamDecoder, check_tokenizer
from tests import generated_model
from tests.formats.vocabularies import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_characters,
    byte_level,
    decode,
    gemma4,
    names,
    spelled_out,
    write,
)
from tests.paths import SHARED
from tests.thorough import rarely

ORACLES = SHARED / "oracle/tokenizer"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared folder with real vocabularies")
no_function_scope = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def real():
    """Tokenizers of the real vocabularies, by name; each is built once."""
    built: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in built:
            built[name] = Tokenizer(GGUF(SHARED / f"models/vocab/{name}.gguf"))
        return built[name]

    return get


@needs_shared
@pytest.mark.parametrize("name", [rarely("llama-bpe"), "phi-3", rarely("gemma-4")])
def test_no_text_has_fewer_tokens_than_its_length_says(real, name):
    """It is refused by that only if it has too many."""
    tokenizer = real(name)
    for id in range(0, tokenizer.vocab_size, 7):
        if not tokenizer.is_hidden(id):
            text = tokenizer.piece(id).decode("utf-8", "replace")
            tokenizer.encode(text * 3, most=len(tokenizer.encode(text * 3)))


# --- against llama.cpp ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(file.stem for file in ORACLES.glob("*.inp")))
def test_llama_cpp_tokenizer_tests_pass_completely(real, name):
    texts = (ORACLES / f"{name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    if not texts[-1]:  # the mark follows every text, or comes between them
        texts.pop()
    expected = [
        [int(id) for id in line.split()] for line in (ORACLES / f"{name}.out").read_text().splitlines()
    ]
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert real(name).encode(text) == ids, repr(text)
        assert decode(real(name), ids) == text


@needs_shared
@pytest.mark.parametrize("file", ["tiny-llama-F32-0", "tiny-qwen3-F32-0"])
def test_oracle_prompts_begin_as_llama_cpp_begins_them(real, file):
    oracle = np.load(SHARED / f"oracle/{file}.npz")
    tokenizer = real("llama-bpe" if "llama" in file else "qwen2")
    for i, prompt in enumerate(oracle["prompts"].tolist()):
        assert tokenizer.encode(prompt, add_special=True) == oracle[f"tokens{i}"].tolist()


@needs_shared
@pytest.mark.parametrize(
    ("name", "bos", "ends"), [("llama-bpe", 128000, {128001, 128009}), ("qwen2", 151643, {151643, 151645})]
)
def test_special_ids_of_real_vocabularies(real, name, bos, ends):
    assert (real(name).bos_id, real(name).eos_ids, real(name).warning) == (bos, ends, "")


@needs_shared
@no_function_scope
@given(text=st.text())
def test_any_text_comes_back(real, text):
    for name in ("llama-bpe", "qwen2"):
        ids = real(name).encode(text)
        assert decode(real(name), ids) == text
        assert not any(real(name).is_hidden(id) for id in ids)


# --- byte-level BPE -------------------------------------------------------------------------------------


def test_merges_apply_in_order_of_rank(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", merges=["b c", "a b", "a bc", "Ġ a"]))
    ids = {t.text(id): id for id in range(t.vocab_size)}
    assert t.encode("abc") == [ids["abc"]]  # b c ranks before a b
    assert t.encode("abx ab") == [ids["ab"], ids["x"], ids["Ġ"], ids["ab"]]  # a b ranks before Ġ a
    assert t.piece(ids["Ġa"]) == b" a"


def test_whole_words_only_where_the_model_wants_them(tmp_path):
    """ignore_merges: `ab` is a token that no merge leads to."""
    for pre, expected in (("llama-bpe", ["ab"]), ("gpt-2", ["a", "b"])):
        gguf = byte_level(tmp_path / pre, special=(("ab", NORMAL),), pre=pre)
        t = Tokenizer(gguf)
        assert [t.text(id) for id in t.encode("ab")] == expected


def test_damaged_merges_are_left_out_with_a_warning(tmp_path):
    tokens = [(c, NORMAL) for c in [*byte_characters(), "ab"]]
    t = Tokenizer(write(tmp_path / "v", "gpt2", tokens, pre="gpt-2", merges=["a b", "no", "é x", "a z"]))
    assert decode(t, t.encode("ab az")) == "ab az" and len(t.encode("ab")) == 1
    assert t.merge.warning == "3 merges of the vocabulary are damaged and were left out."


def test_merges_longer_than_all_tokens_are_left_out(tmp_path):
    """The library's own code panics at them, with an exception that is no Exception."""
    tokens = [(c, NORMAL) for c in byte_characters()]
    t = Tokenizer(write(tmp_path / "v", "gpt2", tokens, pre="gpt-2", merges=["a b", "abc def"]))
    assert decode(t, t.encode("abcdef")) == "abcdef" and t.merge.warning.startswith("2 merges")


def test_bad_utf8_in_a_vocabulary_keeps_its_bytes(tmp_path):
    tokens = [(c, NORMAL) for c in byte_characters()] + [
        (b"\xff\xfe", NORMAL),
        (b"\xff\xfe", CONTROL),
        (b"", NORMAL),
    ]
    t = Tokenizer(write(tmp_path / "v", "gpt2", tokens, pre="gpt-2", merges=["~ ~"]))
    assert (t.piece(256), t.piece(258), t.piece(999), t.piece(-1)) == (b"\xff\xfe", b"", b"", b"")
    assert decode(t, [256]) == "\ufffd\ufffd" and decode(t, t.encode("a\udcff")) == "a\ufffd"
    assert [t.piece(id) for id in range(4)] == [b"\0", b"\1", b"\2", b"\3"]


@pytest.mark.parametrize(
    ("pre", "warning"), [("made-up", 'pre-tokenizer, "made-up"'), (None, "no pre-tokenizer")]
)
def test_unknown_pretokenizer_falls_back_with_a_warning(tmp_path, pre, warning):
    t = Tokenizer(byte_level(tmp_path / "v", pre=pre))
    assert warning in t.warning and decode(t, t.encode("Hello, world! 123")) == "Hello, world! 123"


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_every_pretokenizer_keeps_all_text(tmp_path, pre):
    t = Tokenizer(byte_level(tmp_path / "v", pre=pre))
    text = "It's 1234 tests.\r\n\n  ok\tÄpfel 你好 -- a/b.c HTTPServer I'LL ﬁ ½ 😶‍🌫️ \u0085\u3000. "
    assert decode(t, t.encode(text)) == text and not t.warning


WORDS = {
    # one digit at a time or three; contractions with or without capitals; where spaces and line breaks go
    ("llama-bpe", "I'LL pay 12345 now"): ["I", "'LL", " pay", " ", "123", "45", " now"],
    ("llama-bpe", "a  b\n\n c!!\n"): ["a", " ", " b", "\n\n", " c", "!!\n"],
    ("smaug-bpe", "x12345"): ["x", "123", "45"],
    ("qwen2", "I'LL pay 123 $x"): ["I", "'LL", " pay", " ", "1", "2", "3", " $", "x"],
    ("qwen2", "(word)"): ["(word", ")"],
    ("qwen35", "(re\u0301s\u0301 a\u0301)! \u0301"): ["(re\u0301s\u0301", " a\u0301", ")!", " \u0301"],
    ("falcon", "`a` 4 ½ 12345"): ["`", "a", "`", " 4", " ½", " ", "123", "45"],
    ("seed-coder", "f(12);\n"): ["f", "(", "1", "2", ");", "\n"],
    ("bailingmoe", "a\n\nb"): ["a", "\n\n", "b"],
    ("viking", "en, 12"): ["en", ",", " ", "1", "2"],
    ("gpt-2", "I'LL, we'll 123 (x)"): ["I", "'", "LL", ",", " we", "'ll", " 123", " (", "x", ")"],
    ("gpt-2", "a   b\n\nc"): ["a", "  ", " b", "\n", "\n", "c"],
    ("olmo", "don't 42"): ["don", "'t", " 42"],
    ("smollm", "a 123 b12"): ["a", " ", "1", "2", "3", " b", "1", "2"],
    ("tekken", "HTTPServer camelCase 123"): ["HTTPServer", " camel", "Case", " ", "1", "2", "3"],
    ("tekken", "don't a/b//\n"): ["don", "'t", " a", "/b", "//\n"],
    ("gpt-4o", "I'LL HELLOworld 1234"): ["I'LL", " HELLOworld", " ", "123", "4"],
    ("kimi-k2", "I'LL say 你好HTTPServer 1234"): ["I'LL", " say", " ", "你好", "HTTPServer", " ", "123", "4"],
    ("deepseek-llm", "Hi, 世界 1234\nok"): ["Hi", ",", " ", "世界", " ", "1234", "\n", "ok"],
    ("deepseek-llm", "a! éa  "): ["a", "!", " é", "a", "  "],  # its symbols, ":-~", include plain letters
    ("deepseek-coder", "x = f(12)\n"): ["x", " =", " f", "(", "1", "2", ")", "\n"],
    ("deepseek-v3", "Hi 12345 世界, ok"): ["Hi", " ", "123", "45", " ", "世界", ",", " ok"],
    ("superbpe", "a b 1234567½ x"): ["a b ", "1", "234", "567½", " x"],
    ("chameleon", "a  b, 12 IMGIMGBCZ"): ["a", "  ", "b", ",", " ", "1", "2", " ", "IMGIMGBCZ"],
    ("default", "a.b 12345"): ["a", ".", "b", " ", "123", "45"],
}


@pytest.mark.parametrize(("pre", "text"), WORDS)
def test_words_of_a_pretokenizer(tmp_path, pre, text):
    t = Tokenizer(byte_level(tmp_path / "v", pre=pre))
    words = [text[a:b] for _, (a, b) in t.merge.merger.pre_tokenizer.pre_tokenize_str(text)]
    assert words == WORDS[pre, text]


# --- special tokens -------------------------------------------------------------------------------------

MARKS = (("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<tool>", USER_DEFINED), ("  ", USER_DEFINED))


def test_special_tokens_only_when_asked(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", special=MARKS))
    text = "<|im_start|>a<tool><|im_end|>"
    assert [t.text(id) for id in t.encode(text, special=True)] == [
        "<|im_start|>",
        "a",
        "<tool>",
        "<|im_end|>",
    ]
    assert [t.text(id) for id in t.encode(text)] == list(text)
    assert decode(t, t.encode(text)) == text
    assert decode(t, t.encode(text, special=True)) == "a<tool>"
    assert spelled_out(t, t.encode(text, special=True)) == text


def test_segments_merge_as_text_but_never_into_a_special_token(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", special=MARKS, merges=["a b"]))
    names = lambda segments: [t.text(id) for id in t.encode_segments(segments)]
    assert names([("xa", True), ("by", False)]) == ["x", "ab", "y"]
    assert names([("<|im_", True), ("end|>", True)]) == list("<|im_end|>")
    assert names([("<|im_end|>", False), ("<|im_end|>", True)]) == [*"<|im_end|>", "<|im_end|>"]
    assert names([("", True), ("", False)]) == [] == t.encode("")


def test_user_defined_tokens_without_brackets_are_plain_text(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", special=(*MARKS, ("ö", USER_DEFINED))))
    assert [t.text(id) for id in t.encode("a  bö")] == ["a", "  ", "b", "ö"]
    assert decode(t, t.encode("a  bö")) == "a  bö"


def test_a_whole_word_is_no_special_token_either(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", special=(("stop", CONTROL),), pre="llama-bpe", merges=["s t"]))
    assert [t.text(id) for id in t.encode("stop")] == ["st", "o", "p"]


@no_function_scope
@given(
    pieces=st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool>", "<", "|im_", "end|>", "a", " ", "é"])
    )
)
def test_no_text_encodes_to_a_special_token(tmp_path_factory, pieces):
    t = _with_marks(tmp_path_factory)
    text = "".join(pieces)
    special = {t.special_tokens[name] for name, _ in MARKS if not name.isspace()}
    assert special.isdisjoint(t.encode(text)) and decode(t, t.encode(text)) == text


def _with_marks(tmp_path_factory, cache=[]):  # noqa: B006
    if not cache:
        cache.append(Tokenizer(byte_level(tmp_path_factory.mktemp("v") / "v", special=MARKS, merges=["< |"])))
    return cache[0]


def test_end_tokens_are_known_by_their_text(tmp_path):
    special = tuple((text, CONTROL) for text in ("<|eot_id|>", "<end_of_turn>", "<|other|>", "[my end]"))
    t = Tokenizer(byte_level(tmp_path / "v", special=special, eot_token_id=260))
    assert {t.text(id) for id in t.eos_ids} == {"<|eot_id|>", "<end_of_turn>", "[my end]"}


def test_end_looking_text_that_merges_spell_is_text(tmp_path):
    """Qwen's vocabulary has "</s>" as an ordinary token."""
    t = Tokenizer(byte_level(tmp_path / "v", merges=["< /", "s >", "</ s>"]))
    assert not t.eos_ids and [t.text(id) for id in t.encode("</s>")] == ["</", "s", ">"]
    # Badly typed, but not spelled.
    t = Tokenizer(byte_level(tmp_path / "w", special=(("<|im_end|>", NORMAL),)))
    assert t.eos_ids == {257} and t.is_hidden(257) and len(t.encode("<|im_end|>")) == 10


def test_threads_run_while_a_text_is_merged(tmp_path):
    """A server answers others meanwhile."""
    t = Tokenizer(byte_level(tmp_path / "v", merges=["a b", "ab ab"]))
    ticks, over = [0], threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    t.merge(["ab" * 200_000])
    passed = ticks[0] - before
    over.set()
    thread.join()
    assert passed > 1000


def test_a_list_of_tokens_that_end_a_reply(tmp_path):
    """Files of Ollama have one."""
    with byte_level(tmp_path / "v", eos_token_id=5) as gguf:
        ids = np.array([7, 8, -1, 1 << 30])
        gguf.metadata = {**gguf.metadata, "tokenizer.ggml.eos_token_ids": ids}
        assert Tokenizer(gguf).eos_ids == {5, 7, 8}


def test_tokens_after_those_that_the_model_has_are_none(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf")
    with GGUF(path) as gguf:
        table = gguf.tensors["token_embd.weight"]
        rows = table.shape[0]
        fewer = replace(table, shape=(rows - 2, table.shape[1]))
        gguf.tensors = {**gguf.tensors, "token_embd.weight": fewer}
        t = Tokenizer(gguf)
    assert t.vocab_size == rows - 2 and "<|im_end|>" not in t.special_tokens
    assert max(t.encode("The river <|im_end|>", special=True)) < rows - 2


def test_harmony_parts_do_not_end_a_reply(tmp_path):
    special = tuple((text, CONTROL) for text in ("<|return|>", "<|call|>", "<|end|>"))
    t = Tokenizer(byte_level(tmp_path / "v", special=special))
    assert {t.text(id) for id in t.eos_ids} == {"<|return|>", "<|call|>"}


def test_bos_and_eos_as_the_file_says(tmp_path):
    special = (("<bos>", CONTROL), ("<eos>", CONTROL))
    ids = {"bos_token_id": 257, "eos_token_id": 258}
    encode = lambda name, **keys: Tokenizer(byte_level(tmp_path / name, special=special, **keys)).encode(
        "!", add_special=True
    )
    (plain,) = encode("a", **ids)
    assert encode("b", pre="llama-bpe", **ids) == [257, plain]
    assert encode("c", pre="llama-bpe", add_bos_token=False, **ids) == [plain]
    assert encode("d", add_bos_token=True, add_eos_token=True, **ids) == [257, plain, 258]
    assert encode("e", add_bos_token=True, bos_token_id=99999) == [plain]


# --- Gemma 4 --------------------------------------------------------------------------------------------


def test_gemma4_merges_across_words_but_not_lines(tmp_path):
    t = Tokenizer(gemma4(tmp_path / "v", ["▁ a", "a ▁a", "▁ ▁", "\n \n", "\n\n \n", "a \n"]))
    assert names(t, "a a a") == ["a▁a", "▁a"] and names(t, "a  a") == ["a", "▁", "▁a"]
    assert names(t, "a\n\n\n a") == ["a", "\n\n\n", "▁a"]
    assert names(t, "a<é")[1:] == ["<0x3C>", "<0xC3>", "<0xA9>"]
    for text in ("a a", " a\n\n", "é😀 ", "", "<eos>", "<0x41>"):
        assert decode(t, t.encode(text)) == text
    assert names(t, "a", add_special=True) == ["<bos>", "a"] and not t.warning


@pytest.mark.parametrize(("pre", "begins"), [("sarvam-moe", False), ("granite-embed-multi-311m", True)])
def test_files_of_byte_level_bpe_may_merge_across_words_too(tmp_path, pre, begins):
    t = Tokenizer(gemma4(tmp_path / "v", ["▁ a", "a ▁a"], kind="gpt2", pre=pre, add_bos_token=False))
    assert names(t, "a a a") == ["a▁a", "▁a"] and names(t, "a<")[1:] == ["<0x3C>"]
    assert (names(t, "a", add_special=True) == ["<bos>", "a"]) == begins and not t.warning


def test_a_vocabulary_of_llama_3_needs_no_name(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", pre=None, special=(("<|begin_of_text|>", CONTROL),)))
    assert t.pretokenizer is PRETOKENIZERS["llama-bpe"] and not t.warning


def test_gemma4_begins_with_bos_whatever_its_file_says(tmp_path):
    t = Tokenizer(gemma4(tmp_path / "v", ["▁ a"], add_bos_token=False))
    assert names(t, "a", add_special=True) == ["<bos>", "a"]


# --- WordPiece ------------------------------------------------------------------------------------------


def test_wordpiece(tmp_path):
    """Longest pieces first, in words that are lowercase and have no accents; a word that has no pieces is unknown."""
    pieces = ["▁cafe", "▁the", "ter", "▁.", "▁un", "▁1"]
    texts = [
        ("[CLS]", CONTROL),
        ("[SEP]", CONTROL),
        ("[UNK]", UNKNOWN),
        *((piece, NORMAL) for piece in pieces),
    ]
    ids = {"bos_token_id": 0, "seperator_token_id": 1, "unknown_token_id": 2}
    t = Tokenizer(write(tmp_path / "v", "bert", texts, **ids))
    found = names(t, "The Café: theter. [CLS]un-THE", add_special=True)
    unknown = 3 * ["[UNK]"]  # a name of a special token in a text is none
    words = "▁the", "▁cafe", "[UNK]", "▁the", "ter", "▁.", *unknown, "▁un", "[UNK]", "▁the"
    assert found == ["[CLS]", *words, "[SEP]"]
    assert t.decode(t.encode("the cafe")) == " the cafe" and not t.warning
    assert names(t, "the" + 99 * "ter") == ["[UNK]"], "as words of more than 100 characters"


# --- what is refused ------------------------------------------------------------------------------------


def test_files_without_a_usable_vocabulary(tmp_path):
    def refused(gguf: GGUF, match: str, early: bool = True) -> None:
        with pytest.raises(ModelFileError, match=match) as e:
            check_tokenizer(gguf) if early else Tokenizer(gguf)
        assert e.value.hint and str(e.value).isprintable()

    letters = [(c, NORMAL) for c in "abc"]
    refused(write(tmp_path / "a", "ugly", letters), 'a tokenizer of the kind "ugly"')
    refused(write(tmp_path / "b", "gpt2", letters, pre="gpt-2"), "tokenizer.ggml.merges")
    short = write(tmp_path / "c", "llama", letters, scores=[0.0])
    refused(short, "tokenizer.ggml.scores has 1 entries for 3 tokens", early=False)
    one = write(tmp_path / "d", "llama", [("a", NORMAL)], types=False).path
    one.write_bytes(one.read_bytes().replace(struct.pack("<IQQ", 8, 1, 1) + b"a", struct.pack("<IQ", 8, 0)))
    refused(GGUF(one), "no tokens", early=False)
    long = [(c * (1 << 20), CONTROL) for c in "abc"]
    refused(byte_level(tmp_path / "long.gguf", tuple(long)), "names of its special tokens", early=False)
    refused(write(tmp_path / "e", "bert", letters), "unknown words is 100, of 3", early=False)
    cut = [255, 255, 255, 255]  # which would take 4 GiB
    refused(
        write(tmp_path / "f", "t5", letters, scores=[0.0] * 3, precompiled_charsmap=cut),
        "characters of its tokenizer is cut",
        early=False,
    )


def test_normalizers_that_lead_nowhere_blame_the_file(tmp_path):
    """The library panics at a table of characters whose entries are beyond its end."""
    table = [*np.array([4, 0xFFFFFFFF], np.uint32).tobytes()]
    letters = [(c, NORMAL) for c in "abc"]
    t = Tokenizer(write(tmp_path / "v", "t5", letters, scores=[0.0] * 3, precompiled_charsmap=table))
    with pytest.raises(ModelFileError, match="cannot be used"):
        t.encode("abc")


# --- streaming ------------------------------------------------------------------------------------------


def test_a_character_is_never_split(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v", special=MARKS))
    stream = StreamDecoder(t)
    fed = [stream.feed(id) for id in t.encode("é😀x")]
    assert fed == ["", "é", "", "", "", "😀", "x"] and stream.flush() == ""
    ids = t.encode("😀")
    assert [stream.feed(id) for id in (*ids[:2], t.special_tokens["<|im_end|>"], *ids[2:])] == [
        "",
        "",
        "",
        "",
        "😀",
    ]


def test_bytes_that_are_no_character(tmp_path):
    t = Tokenizer(byte_level(tmp_path / "v"))
    by_byte = {t.piece(id)[0]: id for id in range(256)}
    stream = StreamDecoder(t)
    assert [stream.feed(by_byte[b]) for b in (0xE2, 0x82, 0x41, 0xFF)] == ["", "", "\ufffdA", "\ufffd"]
    assert (stream.feed(by_byte[0xC3]), stream.flush(), stream.flush()) == ("", "\ufffd", "")


@no_function_scope
@given(data=st.binary(max_size=40))
def test_streaming_any_bytes_is_decoding_them(tmp_path_factory, data):
    t = _with_marks(tmp_path_factory)
    by_byte = {t.piece(id)[0]: id for id in range(256)}
    assert decode(t, (by_byte[b] for b in data)) == data.decode("utf-8", "replace")


def test_think_marks_are_shown_even_if_they_are_control_tokens(tmp_path):
    t = Tokenizer(
        byte_level(
            tmp_path / "v", special=(("<think>", CONTROL), ("</think>", USER_DEFINED), ("<x>", CONTROL))
        )
    )
    assert decode(t, [257, 259, 258]) == "<think></think>"
    others = ("[THINK]", "<|channel>", "<|message|>", "<|end|>")
    t = Tokenizer(byte_level(tmp_path / "w", special=tuple((mark, CONTROL) for mark in others)))
    assert decode(t, [257, 258, 259, 260]) == "[THINK]<|channel><|message|>"  # <|end|> ends a reply here


def test_texts_of_earlier_prompts_are_not_merged_again(tmp_path, monkeypatch):
    t = Tokenizer(byte_level(tmp_path / "v", special=MARKS, merges=["a b"]))
    merge, merged = t.merge, []
    monkeypatch.setattr(t, "merge", lambda words: merged.extend(words) or merge(words))
    chat = [("<|im_start|>", True), ("abba", False), ("<|im_end|>", True), ("abba", False)]
    ids = t.encode_segments(chat)
    assert t.encode_segments([*chat, ("<|im_start|>", True), ("new", False)], most=13)[: len(ids)] == ids
    assert merged == ["abba", "new"]
    monkeypatch.setattr("engine.formats.tokens.tokenizer._REMEMBERED_BYTES", 400)
    assert len(t.encode("c" * 90)) == 90 and t.encode_segments(chat) == ids
    assert merged == ["abba", "new", "c" * 90, "abba"] and [*t._remembered] == ["abba"]


def test_what_is_remembered_of_many_short_texts_is_bounded_in_bytes(tmp_path, monkeypatch):
    t = Tokenizer(byte_level(tmp_path / "v"))
    monkeypatch.setattr("engine.formats.tokens.tokenizer._REMEMBERED_BYTES", 10_000)
    tracemalloc.start()
    for i in range(2_000):
        t.encode(f"{i}")
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(t._remembered) > 20 and held_bytes < 30_000
    monkeypatch.setattr("engine.formats.tokens.tokenizer._REMEMBERED_TEXTS", 7)
    t.encode("and one more")
    assert len(t._remembered) == 7
