"""How byte-level BPE tokenizers split text into words before merging, by the name in `tokenizer.ggml.pre`.

The patterns are those of the models' tokenizer.json files, as src/llama-vocab.cpp in llama.cpp lists them. Each pattern
splits every piece that the one before left, into its matches and the text between them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pretokenizer:
    """`whole_words`: a word that is a token becomes that token without merging (`ignore_merges` in tokenizer.json).
    `add_bos`: whether to begin a text with BOS if the file does not say, `always_bos`: whatever it says."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    always_bos: bool = False


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# words with capitals first and then at least one small letter, and words with at least one capital
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + f"{_UPPER}*{_LOWER}+"
_CASED_CAPITALS = r"[^\r\n\p{L}\p{N}]?" + f"{_UPPER}+{_LOWER}*"
_PATH_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

# letters with a case, as DeepSeek lists them
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"

_LLAMA3 = "|".join([_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES])
_QWEN2 = "|".join([_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS, _SPACES])
_QWEN35 = "|".join(  # as Qwen2's, but marks belong to words
    [_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES]
)
_SEED = "|".join([_CONTRACTIONS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES])
_LAGUNA = (r"[^\n]+|\n+", _QWEN2)
_UFAKZEKA = _QWEN2.removeprefix(_CONTRACTIONS + "|")
_EXAONE_MOE = "|".join(
    [
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ]
)
_JAIS2 = "|".join(
    [
        *(_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS, r"\s*[\r\n]+"),
        *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)),
        r"\s{1,2}(?!\S)|\s",
    ]
)
_BAILING = "|".join([_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS, r"\s*[\r\n]|\s+(?!\S)|\s+"])
_TEKKEN = "|".join([_CASED, _CASED_CAPITALS, r"\p{N}", _PATH_SYMBOLS, _SPACES])
_GPT4O = "|".join(
    [f"{_CASED}{_CONTRACTIONS}?", f"{_CASED_CAPITALS}{_CONTRACTIONS}?", r"\p{N}{1,3}", _PATH_SYMBOLS, _SPACES]
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _GPT4O.replace("{1,3}", ""),
)
# as GPT-4o's, but Chinese characters are words of their own
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = "|".join(
    [r"[\p{Han}]+", _GPT4O.replace(r"\p{M}]", r"\p{M}" + _NOT_HAN).replace(_PATH_SYMBOLS, _SYMBOLS)]
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)

_SPARK = (
    *_DEEPSEEK_V3[:2],
    _DEEPSEEK_V3[2].replace(r"+[\r\n]*|" + _SPACES, r"+|[\r\n]|\s+(?!\S)|\s+"),
    r"\p{N}",
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # of a number's digits, from its end
_AFMOE_SCRIPTS = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
_AFMOE = (_THREES, _AFMOE_SCRIPTS, _DEEPSEEK_V3[2])
# Digits are apart from all else, and in threes from the end; words are not apart.
_SUPERBPE = (r"\p{N}+", r"[\s\S](?:(?!(?:\d{3})+(?!\d))[\s\S])*")
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2_WORDS,
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")
_WITHOUT_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"

DEFAULT = Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))

_LINES = (r"[^\n]+|\n+",)
GEMMA4 = Pretokenizer(_LINES, always_bos=True)
LINES = {"gemma4": GEMMA4, "granite-embed-multi-311m": GEMMA4, "sarvam-moe": Pretokenizer(_LINES)}
"""Those whose BPE merges across words, but not across lines, of characters in place of bytes."""
UNSAID = {"<|begin_of_text|>": "llama-bpe"}
"""What a vocabulary with such a token has where its file does not say: Llama 3's of early files, and BitNet's."""

_NAMES: tuple[tuple[str, Pretokenizer], ...] = (
    ("default", DEFAULT),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Pretokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("smaug-bpe dbrx chatglm-bpe", Pretokenizer((_LLAMA3,))),
    ("glm4 glm5", Pretokenizer((_LLAMA3,), whole_words=True)),
    ("minicpm5", Pretokenizer((r"\p{N}{1,3}", _LLAMA3), whole_words=True)),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2",
        Pretokenizer((_QWEN2,)),
    ),
    ("qwen35", Pretokenizer((_QWEN35,))),
    ("laguna", Pretokenizer(_LAGUNA)),
    ("ufakzeka", Pretokenizer((_UFAKZEKA,))),
    ("exaone-moe", Pretokenizer((_EXAONE_MOE,))),
    ("jais-2", Pretokenizer((_JAIS2,))),
    ("youtu", Pretokenizer(_YOUTU, whole_words=True)),
    ("spark2_5", Pretokenizer(_SPARK)),
    ("afmoe", Pretokenizer(_AFMOE)),
    ("seed-coder", Pretokenizer((_SEED,))),
    ("bailingmoe bailingmoe2 llada-moe", Pretokenizer((_BAILING,))),
    (
        "gpt-2 phi-2 mpt olmo jais exaone4 gigachat trillion mellum a.x-4.0 granite-docling jina-es jina-de jina-v2-es "
        "jina-v2-de modern-bert jina-v1-en jina-v2-code roberta-bpe",
        Pretokenizer((_GPT2_WORDS,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        Pretokenizer((r"\p{N}", _GPT2_WORDS)),
    ),
    ("falcon", Pretokenizer(_FALCON)),
    ("superbpe", Pretokenizer(_SUPERBPE)),
    ("chameleon", Pretokenizer(_CHAMELEON, add_bos=True)),
    ("poro-chat bloom gpt3-finnish", Pretokenizer((_WITHOUT_PUNCTUATION,))),
    ("viking", Pretokenizer((_WITHOUT_PUNCTUATION, r"\p{N}"))),
    ("tekken", Pretokenizer((_TEKKEN,), whole_words=True, add_bos=True)),
    ("tiny_aya cohere2moe", Pretokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("gpt-4o llama4 kanana2 minimax-m2 talkie", Pretokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", Pretokenizer((_GPT4O,), whole_words=True)),
    ("kimi-k2", Pretokenizer((_KIMI,))),
    ("deepseek-llm", Pretokenizer(_DEEPSEEK_LLM)),
    ("deepseek-coder", Pretokenizer(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Pretokenizer(_DEEPSEEK_V3)),
)
PRETOKENIZERS = {name: pretokenizer for names, pretokenizer in _NAMES for name in names.split()}
