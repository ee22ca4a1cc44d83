from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stops import StopAutomaton, StopMatcher

ALPHABET = "ab<"


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look at every beginning of the text, the shortest first."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run(parts: list[str], stops: list[str], *, is_included: bool = False) -> StopMatcher:
    return StopMatcher(StopAutomaton(stops), is_included=is_included)


texts = st.lists(st.text(ALPHABET, max_size=4), max_size=12)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


@given(texts, stop_lists)
def test_any_split_gives_the_text_before_the_stop_that_completes_first(
    parts: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    shown = "".join(map(matcher.push, parts)) + matcher.flush()
    assert (shown, matcher.matched) == reference("".join(parts), stops)


@given(texts, stop_lists)
def test_only_a_possible_beginning_is_held_back(parts: list[str], stops: list[str]) -> None:
    matcher, shown, seen = StopMatcher(StopAutomaton(stops)), "", ""
    for part in parts:
        shown, seen = shown + matcher.push(part), seen + part
        if matcher.matched is None:
            held = seen.removeprefix(shown)
            begins = any(stop.startswith(held) and stop != held for stop in stops)
            longer = any(stop.startswith(seen[k:]) for stop in stops for k in range(len(shown)))
            assert begins
            assert not longer, "a longer suffix could have become a stop string"


def test_ties_go_to_the_first_of_the_list() -> None:
    for stops in (["xend", "end"], ["end", "xend"]):
        matcher = StopMatcher(StopAutomaton(stops))
        matcher.push("a xend")
        assert matcher.matched == stops[0]


def test_the_one_that_completes_first_wins_even_inside_another() -> None:
    matcher = StopMatcher(StopAutomaton(["abcd", "bc"]))
    assert matcher.push("abcd") == "a"
    assert matcher.matched == "bc"


def test_an_included_stop_string_is_shown_and_nothing_behind_it() -> None:
    matcher = StopMatcher(StopAutomaton(["END"]), is_included=True)
    assert matcher.push("a EN") == "a "
    assert matcher.push("D b") == "END"
    assert matcher.push("c") == ""


def test_nothing_matches_before_it_is_armed() -> None:
    matcher = StopMatcher(StopAutomaton(["ab"]))
    matcher.is_armed = False
    assert matcher.push("xaby") == "xaby"
    assert matcher.push("a") == ""
    matcher.is_armed = True
    assert matcher.push("b") == ""
    assert matcher.matched == "ab"


def test_an_unarmed_complete_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(StopAutomaton(["ab"]))
    matcher.is_armed = False
    assert matcher.push("ab") == "ab"


def test_many_long_stop_strings_cost_no_more_per_character() -> None:
    stops = ["a" * 255 + chr(ord("b") + i) for i in range(16)]
    matcher = StopMatcher(StopAutomaton(stops))
    assert len("".join(matcher.push("a") for _ in range(20_000))) == 20_000 - 255
