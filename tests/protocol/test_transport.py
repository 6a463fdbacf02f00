import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import transport
from engine.protocol.events import Failed, Token, event_decoder
from engine.protocol.transport import MAX_FRAME_BYTES, Deframer, FrameError, pack


@given(st.lists(st.text(), max_size=8), st.lists(st.integers(1, 40)))
def test_records_survive_any_cutting(texts, cuts):
    tokens = [Token(request_id=1, id=i, text=text) for i, text in enumerate(texts)]
    stream = b"".join(map(pack, tokens))
    deframer, seen, position = Deframer(), [], 0
    for cut in [*cuts, len(stream)]:
        seen += [event_decoder.decode(p) for p in deframer.feed(stream[position : position + cut])]
        position += cut
    assert seen == tokens


def test_frames_before_a_bad_one_still_arrive():
    good = Failed(kind="internal", message="good")
    payloads = Deframer().feed(pack(good) + (MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    assert event_decoder.decode(next(payloads)) == good
    with pytest.raises(FrameError):
        next(payloads)


def test_a_record_too_large_for_a_frame_is_refused_where_it_is_made(monkeypatch):
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError):
        pack(Token(request_id=1, id=0, text="x" * 100))
