import json

from shared import sse


def test_an_event_is_one_data_line_and_a_blank_line() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'


def test_nothing_that_a_client_takes_for_a_line_end_is_left() -> None:
    text = "a\u2028b\u2029c\x85d\r\né"
    document = json.dumps({"text": text}, ensure_ascii=False).encode()
    frame = sse.event(document)
    assert len(frame.decode().splitlines()) == 2
    assert json.loads(frame.decode().removeprefix("data: "))["text"] == text


def test_the_comment_and_the_end_are_frames_of_their_own() -> None:
    assert sse.KEEP_ALIVE == b": keep-alive\n\n"
    assert sse.DONE == b"data: [DONE]\n\n"


def test_a_named_event_has_its_name_first_and_one_data_line() -> None:
    assert (
        sse.named_event(b"x", '{"a":"\u2028"}'.encode()) == b'event: x\ndata: {"a":"\\u2028"}\n\n'
    )
    assert sse.named_event(b"ping", b'{"type":"ping"}') == sse.PING
