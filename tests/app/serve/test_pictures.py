"""Pictures in requests: what is taken, and what is refused with the reason."""

import base64
import textwrap
from urllib.parse import quote

import pytest

from app.serve.protocols.common.pictures import NOT_READ, NOT_SEEN
from app.serve.service import ModelFile
from engine.description.encoder_input import Grid
from engine.description.vision_reader import read_vision
from engine.formats.gguf import GGUF
from engine.protocol.events import PICTURE_MARK, Failed
from tests import generated_encoder
from tests.app.fake_engine import READY, SEEING, FakeEngine, reply
from tests.pictures import plain_picture

PICTURE = plain_picture() + bytes(range(240, 256)) * 2  # what follows a picture does not count
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
CHAT = "/v1/chat/completions"


def asked(*parts, role="user"):
    return {"messages": [{"role": role, "content": list(parts)}]}


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://169.254.169.254/latest/meta-data", "fetches nothing"),
        ("HTTPS://example.org/a.png", "fetches nothing"),
        ("file:///etc/passwd", "opens no files"),
        ("/etc/passwd", "opens no files"),
        ("data:image/png," + DATA, "in base64"),
        ("data:image/png;base64,****", "not valid base64"),
        ("data:image/png;base64," + "%41" * 8, "not valid base64"),
        ("data:image/png;base64," + base64.b64encode(b"text").decode(), "not a picture. JPEG"),
        ("data:image/heic;base64," + base64.b64encode(b"\0\0\0\x18ftypheic").decode(), "a HEIC file"),
        (None, "no picture"),
        (" ", "no picture"),
    ],
)
async def test_what_is_not_taken(served, url, reason):
    engine = FakeEngine()
    client, _ = served(engine, ready=SEEING)
    for path, body in (
        (CHAT, asked(image(url))),
        ("/v1/responses", {"input": asked({"type": "input_image", "image_url": url})["messages"]}),
        ("/v1/messages", asked({"type": "image", "source": {"type": "url", "url": url}}) | {"max_tokens": 9}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400 and reason in response.json()["error"]["message"], path
    assert not engine.requests


@pytest.mark.parametrize(
    "url",
    [
        URL.replace("image/png", "text/plain;charset=utf-8"),
        URL.rstrip("="),
        URL.replace("+", "-").replace("/", "_").replace("data:image_png", "data:image/png"),
        "data:image/png;base64," + quote(DATA, safe=""),
        "\n" + "\n".join(textwrap.wrap(URL, 76)),
        DATA,
    ],
)
async def test_forms_of_base64_that_clients_send(served, url):
    engine = FakeEngine(reply("A cat."))
    client, _ = served(engine, ready=SEEING)
    assert (await client.post(CHAT, json=asked(image(url)))).status_code == 200
    assert engine.requests[0].prompt.messages[0].pictures[0].data == PICTURE


@pytest.mark.parametrize(
    "part",
    [
        image(URL),
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL}},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL},
    ],
)
async def test_each_protocol_takes_the_pictures_of_all(served, part):
    engine = FakeEngine()
    client, _ = served(engine, ready=SEEING)
    for path, body in (
        (CHAT, asked(part)),
        ("/v1/responses", {"input": asked(part)["messages"]}),
        ("/v1/messages", asked(part) | {"max_tokens": 9}),
    ):
        assert (await client.post(path, json=body)).status_code == 200, path
        assert engine.requests[-1].prompt.messages[0].pictures[0].data == PICTURE


async def test_marks_in_texts_are_no_pictures_and_pictures_keep_their_places(served):
    engine = FakeEngine(reply("Yes."))
    client, _ = served(engine, ready=SEEING)
    text = {"type": "text", "text": f"a{PICTURE_MARK}"}
    assert (await client.post(CHAT, json=asked(text, image(URL), text))).status_code == 200
    assert (await client.post(CHAT, json=asked(text, role="system"))).status_code == 200
    first, second = (request.prompt.messages[0] for request in engine.requests)
    assert first.content == f"a\ufffd{PICTURE_MARK}a\ufffd" and len(first.pictures) == 1
    assert second.content == "a\ufffd"
    refused = await client.post(CHAT, json=asked(image(URL), role="assistant"))
    assert "messages of the user" in refused.json()["error"]["message"]


async def test_a_picture_in_a_tools_result_comes_from_the_user(served):
    engine = FakeEngine(reply("Blue."))
    client, _ = served(engine, ready=SEEING)
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    turns = [("user", "Look."), ("assistant", [call]), ("user", [result])]
    body = {"max_tokens": 9, "messages": [{"role": role, "content": content} for role, content in turns]}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    result["content"].append({"type": "image", "source": source, "title": 5})
    assert (await client.post("/v1/messages", json=body)).status_code == 400
    item = {
        "type": "function_call_output",
        "call_id": "1",
        "output": [{"type": "input_image", "image_url": URL}],
    }
    assert (await client.post("/v1/responses", json={"input": [item]})).status_code == 200
    done = {"role": "tool", "tool_call_id": "1", "content": [image(URL)]}
    assert (await client.post(CHAT, json={"messages": [done]})).status_code == 200
    for request in engine.requests:
        *_, tool, user = request.prompt.messages
        assert (tool.role, user.role, user.content) == ("tool", "user", PICTURE_MARK)
        assert user.pictures[0].data == PICTURE
    asks = {"role": "user", "content": "And?"}
    assert (await client.post(CHAT, json={"messages": [done, done, asks]})).status_code == 200
    *_, tool, user = engine.requests[-1].prompt.messages
    assert (tool.content, user.content, len(user.pictures)) == ("(a picture)", f"{PICTURE_MARK * 2}And?", 2)


async def test_a_model_that_does_not_see_says_so(served):
    client, _ = served(engine := FakeEngine(*[reply("Well.")] * 3), ready=READY)
    refused = await client.post(CHAT, json=asked(image(URL)))
    assert refused.status_code == 400 and "tiny sees no pictures" in refused.json()["error"]["message"]
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(b"%PDF-1").decode()}
    picture = {
        "type": "image",
        "source": {**source, "media_type": "image/png", "data": URL.partition(",")[2]},
    }
    texts = [{"type": "text", "text": "Here:"}, {"type": "document", "source": source}, picture]
    result = {"type": "tool_result", "tool_use_id": "1", "content": texts}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
    assert (await client.post("/v1/messages", json=body)).status_code == 200, "an agent could not go on"
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": source["data"]}}
    done = {"role": "tool", "tool_call_id": "1", "content": [*texts[:1], file, image(URL)]}
    assert (await client.post(CHAT, json={"messages": [done]})).status_code == 200
    output = [
        {"type": "input_text", "text": "Here:"},
        {"type": "sound"},
        {"type": "input_image", "image_url": URL},
    ]
    item = {"type": "function_call_output", "call_id": "1", "output": output}
    assert (await client.post("/v1/responses", json={"input": [item]})).status_code == 200
    for request in engine.requests[-3:]:
        [tool] = request.prompt.messages
        assert tool.content.replace("\n", "") == f"Here:{NOT_READ}{NOT_SEEN}" and not tool.pictures
    [model] = (await client.get("/v1/models")).json()["data"]
    assert model["architecture"]["modality"] == "text->text"
    assert not (await client.get("/props")).json()["modalities"]["vision"]
    client, _ = served(ready=SEEING)
    [model] = (await client.get("/v1/models")).json()["data"]
    assert model["architecture"]["modality"] == "text+image->text" and model["capabilities"]["image_input"]
    assert (await client.get("/props")).json()["modalities"]["vision"]


async def test_what_the_engine_says_of_a_picture_is_passed_on(served):
    damaged = Failed(kind="usage", message="The picture is damaged: cut off.", request_id=1)
    client, _ = served(FakeEngine([damaged]), ready=SEEING)
    response = await client.post(CHAT, json=asked(image(URL)))
    assert response.status_code == 400 and "damaged" in response.json()["error"]["message"]


async def test_tokens_of_pictures_are_counted_without_the_engine(served, model_path, tmp_path):
    encoder = generated_encoder.write(tmp_path / "mmproj.gguf", "qwen3vl_merger")
    client, _ = served(ready=SEEING, file=ModelFile.read(model_path, str(encoder)))
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    path, body = "/v1/messages/count_tokens", asked({"type": "text", "text": "?"})
    text = (await client.post(path, json=body)).json()["input_tokens"]
    body["messages"][0]["content"] = [block, *body["messages"][0]["content"]]
    both = (await client.post(path, json=body)).json()["input_tokens"]
    with GGUF(encoder) as file:
        spec = read_vision(file)
    tokens = Grid.of(spec, 60, 40).tokens(spec)
    assert both - text >= tokens > 8, "what stands around a picture counts, too"
    prompt = (await client.post("/apply-template", json=asked(image(URL)))).json()["prompt"]
    assert prompt.startswith("<|im_start|>user")
