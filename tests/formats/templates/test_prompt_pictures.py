"""Messages with pictures as prompts: where a picture stands, whatever the template makes of it."""

import pytest

from engine.errors import ContextFullError, PictureError
from engine.formats.templates.prompt_pictures import PICTURE_MARKS, Part, PictureProcessor, SizedPicture
from engine.formats.templates.template import ChatTemplate
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import PICTURE_MARK, Message, Picture
from tests.formats.vocabularies import CONTROL, byte_level, spelled_out

IMAGES = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
DEAF = (
    "{# image #}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content if m.content is string else m.content[-1].text }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    special = [(name, CONTROL) for name in IMAGES]
    return Tokenizer(byte_level(tmp_path_factory.mktemp("v") / "v", special=tuple(special)))


@pytest.fixture
def encode(tokenizer):
    def read(picture):
        n = picture.data[0]
        return SizedPicture((), 1, n, (-n,) * n, str(n))

    def encode(source, *messages, **options):
        template = ChatTemplate(source, "other", tokenizer)
        template.picture_processor = PictureProcessor(read, PICTURE_MARKS["qwen3vl_merger"])
        prompt = template.encode(messages, **options)
        text = "".join(str(id) if id < 0 else spelled_out(tokenizer, [id]) for id in prompt.ids)
        return text, [at.first for at in prompt.pictures], prompt.ids

    return encode


def user(text, *sizes):
    return Message(role="user", content=text, pictures=tuple(Picture(data=bytes([n])) for n in sizes))


@pytest.mark.parametrize("source", [PARTS, TEXT, DEAF])
def test_pictures_stand_where_their_marks_are(encode, source):
    text, first, ids = encode(source, user(f"a {PICTURE_MARK} b", 2))
    assert text == "[user]a <|vision_start|>-2-2<|vision_end|> b"
    assert ids[first[0] : first[0] + 2] == [-2, -2]
    text, _, _ = encode(source, user("what?", 1, 2), user(f"and {PICTURE_MARK}", 3))
    first, second = (f"<|vision_start|>-{'-'.join([str(n)] * n)}<|vision_end|>" for n in (1, 2))
    assert text.startswith(f"[user]{first}{second}what?")
    assert text.endswith("-3-3-3<|vision_end|>")


@pytest.mark.parametrize("source", [PARTS, TEXT])
def test_nobody_spells_a_picture(encode, source):
    spelled = "".join(IMAGES)
    text, first, ids = encode(source, user(f"{spelled} {PICTURE_MARK}{PICTURE_MARK}", 1))
    rest = "\N{REPLACEMENT CHARACTER}"
    assert text.rstrip(rest) == f"[user]{spelled} <|vision_start|>-1<|vision_end|>"
    assert text.endswith(rest)
    assert first == [ids.index(-1)]


def test_qwen_omni_has_marks_of_its_own(tmp_path):
    names = "<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"
    tokenizer = Tokenizer(byte_level(tmp_path / "v", special=tuple((name, CONTROL) for name in names)))
    template = ChatTemplate(PARTS.replace("".join(IMAGES), "".join(names)), "qwen2vl", tokenizer)
    template.picture_processor = PictureProcessor(
        lambda _: SizedPicture((), 1, 1, (-7,), ""), PICTURE_MARKS["qwen2.5o"]
    )
    ids = template.encode([user(f"a{PICTURE_MARK}", 1)]).ids
    assert ids[-3:] == [tokenizer.special_tokens[names[0]], -7, tokenizer.special_tokens[names[2]]]


WHOLE = Part(2)
DOWN = Part(3, (1, 1)), Part(3, (2, 1))
ACROSS = Part(1, (1, 1)), Part(1, (1, 2)), Part(1, (2, 1)), Part(1, (2, 2))
FAKE = "<fake_token_around_image>"


@pytest.mark.parametrize(
    "kind, parts, text",
    [
        ("idefics3", [WHOLE], f"{FAKE}<global-img>--{FAKE}"),
        (
            "idefics3", [*DOWN, WHOLE],
            f"{FAKE}<row_1_col_1>---\n{FAKE}<row_2_col_1>---\n\n{FAKE}<global-img>--{FAKE}",
        ),
        ("lfm2", [WHOLE], "<|image_start|>--<|image_end|>"),
        (
            "lfm2", [*DOWN, WHOLE],
            "<|image_start|><|img_row_1_col_1|>---<|img_row_2_col_1|>---<|img_thumbnail|>--<|image_end|>",
        ),
        ("llama4", [WHOLE], "<|image_start|><|image|>--<|image_end|>"),
        (
            "llama4", [*ACROSS, WHOLE],
            "<|image_start|>-<|tile_x_separator|>-<|tile_y_separator|>-<|tile_x_separator|>-<|tile_y_separator|>"
            "<|image|>--<|image_end|>",
        ),
        ("minicpmv4_6", [WHOLE], "<image_id>0</image_id><image>--</image>"),
        (
            "minicpmv4_6", [WHOLE, *DOWN],
            "<image_id>0</image_id><image>--</image><slice>---</slice>\n<slice>---</slice>",
        ),
        (
            "resampler 2.5", [WHOLE, *ACROSS],
            "<image>--</image><slice><image>-</image><image>-</image>\n<image>-</image><image>-</image></slice>\n",
        ),
    ],
)  # fmt: skip
def test_texts_stand_around_the_parts_of_a_picture(kind, parts, text, tokenizer):
    """And this template reads a message only in parts."""
    mark = PICTURE_MARKS[kind].written
    source = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}MARK{% endif %}{{ p.text }}"
    )
    n = sum(part.tokens for part in parts)
    seen = SizedPicture((), 1, n, (-1,) * n, "", tuple(parts))
    template = ChatTemplate(
        f"{source.replace('MARK', mark)}{{% endfor %}};{{% endfor %}}", "other", tokenizer
    )
    template.picture_processor = PictureProcessor(lambda _: seen, PICTURE_MARKS[kind])
    prompt = template.encode([user("so", 1), user("hm")])
    assert "".join("-" if id < 0 else spelled_out(tokenizer, [id]) for id in prompt.ids) == f"{text}so;hm;"
    assert prompt.pictures[0].picture.ids.count(-1) == n


@pytest.mark.parametrize("asked", [user("hm", 200), user("hm" * 99, *[1] * 30), user("hm", *[1] * 200)])
def test_what_has_no_room(encode, asked):
    """The sentence has the tokens of the whole conversation and of the whole context: agents read both numbers."""
    with pytest.raises(ContextFullError, match=r"the context holds 100\.") as refused:
        encode(TEXT, asked, most=100)
    assert refused.value.tokens > refused.value.most == 100


def test_a_model_that_does_not_see_says_so(tokenizer):
    with pytest.raises(PictureError, match="sees no pictures"):
        ChatTemplate(TEXT, "other", tokenizer).encode([user("what?", 1)])
