import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.ordered import Kind, OrderedText
from tests.services.detokenizer.driven import THOUGHT_TEXT_CALLS
from tests.services.detokenizer.outputs import machine
from tests.services.detokenizer.words import VOCABULARY, ids

Shown = list[tuple[Kind, str, str]]
TOKENS = st.lists(
    st.sampled_from([*sorted(VOCABULARY.added_ids), *ids("a \n{}"), *ids("now"), 0xE6]),
    max_size=40,
)


def runs(
    tokens: list[int],
    *,
    taken_every: int = 1,
    is_cut: bool = False,
    shows_reasoning: bool = True,
    shows_all_calls: bool = True,
) -> Shown:
    """Whole runs, put together from what each take brought."""
    text = OrderedText(
        machine(starts_in_reasoning=True),
        shows_reasoning=shows_reasoning,
        shows_all_calls=shows_all_calls,
    )
    found: Shown = []

    def take() -> None:
        assert bool(text.delta) == bool(text.delta.runs)
        for run in text.take().runs:
            if run.is_new:
                found.append((run.kind, run.name, run.text))
            else:
                kind, name, before = found.pop()
                assert kind is run.kind
                found.append((kind, name, before + run.text))

    for number, token in enumerate(tokens, 1):
        text.push(token)
        if number % taken_every == 0:
            take()
    text.finish(is_cut=is_cut)
    take()
    return found


def test_runs_stand_in_the_order_of_the_output() -> None:
    tokens = ids(THOUGHT_TEXT_CALLS + "after<think>more</think>end")
    assert runs(tokens) == [
        (Kind.REASONING, "", "R 1"),
        (Kind.CONTENT, "", "Hi"),
        (Kind.CALL, "get_weather", '{"city": "Paris"}'),
        (Kind.CALL, "now", "{}"),
        (Kind.CONTENT, "", "after"),
        (Kind.REASONING, "", "more"),
        (Kind.CONTENT, "", "end"),
    ]


@given(TOKENS, st.booleans())
def test_how_often_somebody_takes_changes_nothing(tokens: list[int], is_cut: bool) -> None:
    one_by_one = runs(tokens, is_cut=is_cut)
    assert runs(tokens, taken_every=3, is_cut=is_cut) == one_by_one
    assert runs(tokens, taken_every=1000, is_cut=is_cut) == one_by_one


def test_what_is_not_to_be_shown_is_left_out() -> None:
    tokens = ids(THOUGHT_TEXT_CALLS)
    kinds = [kind for kind, _, _ in runs(tokens, shows_reasoning=False, shows_all_calls=False)]
    assert kinds == [Kind.CONTENT, Kind.CALL]


def test_what_waits_is_counted_and_joined() -> None:
    text = OrderedText(machine(), shows_reasoning=True, shows_all_calls=True)
    for token in ids("a" * 3000):
        text.push(token)
    assert text.delta.num_chars == 3000
    assert len(text.delta.runs[0].pieces) == 3000
    text.delta.compact()
    assert text.delta.runs[0].pieces == ["a" * 3000]


@pytest.mark.parametrize(
    ("output", "state"), [("", (True, False)), ("</think>", (False, True)), ("<tool_call>", ())]
)
def test_the_state_is_that_of_the_machine(output: str, state: tuple[bool, ...]) -> None:
    text = OrderedText(
        machine(starts_in_reasoning=True), shows_reasoning=True, shows_all_calls=True
    )
    for token in [*ids("R"), *ids(output)]:
        text.push(token)
    assert (text.is_reasoning, text.is_content) == (state or (False, False))
    assert text.num_reasoning_tokens == 1


def test_runs_of_content_tell_the_tokens_of_their_text() -> None:
    text = OrderedText(machine(), shows_reasoning=True, shows_all_calls=False, tells_tokens=True)
    for token in ids(
        " a \n<tool_call>now</tool_call> <tool_call>now</tool_call>b<think>c</think> "
    ):
        text.push(token)
    text.finish(is_cut=False)
    found = [(run.kind, run.text, run.tokens) for run in text.take().runs]
    assert found == [
        (Kind.CONTENT, " a", [0, 1]),
        (Kind.CALL, "{}", []),
        (Kind.CONTENT, "b", [4]),
        (Kind.REASONING, "c", []),
        (Kind.CONTENT, " ", [5]),
    ]
