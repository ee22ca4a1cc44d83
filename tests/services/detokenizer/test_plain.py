import pytest

from services.detokenizer.plain import PlainText
from services.detokenizer.stops import StopAutomaton, StopMatcher
from tests.services.detokenizer.words import VOCABULARY, ids


def run(text: str, *, skips: bool = True, stops: list[str] | None = None) -> tuple[str, PlainText]:
    matcher = StopMatcher(StopAutomaton(stops)) if stops else None
    plain = PlainText(VOCABULARY, skips_special_tokens=skips, stops=matcher)
    for token in ids(text):
        plain.push(token)
    plain.finish(is_cut=False)
    return "".join(plain.take().content), plain


@pytest.mark.parametrize(("skips", "shown"), [(True, "a<think>b"), (False, "a<|user|><think>b")])
def test_special_tokens_are_left_out_and_other_tags_are_text(skips: bool, shown: str) -> None:
    assert run("a<|user|><think>b", skips=skips)[0] == shown


def test_a_stop_string_cuts_the_text() -> None:
    text, plain = run("one two three", stops=["tw"])
    assert (text, plain.matched) == ("one ", "tw")


def test_what_was_held_back_for_nothing_comes_at_the_end() -> None:
    assert run("one tw", stops=["two"])[0] == "one tw"


def test_an_incomplete_tail_is_flushed() -> None:
    plain = PlainText(VOCABULARY, skips_special_tokens=True)
    plain.push(0xF0)
    plain.finish(is_cut=True)
    assert plain.take().content == ["�"]
