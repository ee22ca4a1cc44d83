"""One model says the same however it is cut, guessed and captured: real processes, float32.

Every way of starting the mesh answers the same requests, sent at once; `layouts` chooses the ways,
`same_tokens` judges. The few ways in which every option is there run always, those in which every
two options meet by `make soak`.
"""

from collections.abc import Callable

import pytest

from tests.e2e.layouts import PLAIN, Way, each_once, pairwise
from tests.e2e.mesh import Mesh
from tests.e2e.same_tokens import (
    LIMITS,
    ROUNDING,
    Answer,
    Request,
    Verdict,
    answers,
    compare,
    requests,
)

Answers = dict[str, list[Answer]]
ALL = pairwise()
FEW = each_once(ALL)
ASKED = requests()


def run(way: Way, do: Callable[[Mesh], Answers]) -> Answers:
    """Start the mesh in a way, see that it is that way, stop it in good order."""
    mesh = Mesh(*LIMITS, *way.flags, environment=way.environment)
    try:
        found = do(mesh)
        mesh.until_idle()
        check_is(mesh, way)  # counts come behind the answers
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
    assert "s, killed" not in mesh.screen
    return found


def check_is(mesh: Mesh, way: Way) -> None:
    """A flag without effect would make any comparison agree."""
    ranks = [name for name in mesh.state()["services"] if name.startswith("worker")]
    assert len(ranks) == way.num_ranks
    if way.graphs != "eager":
        assert not any("steps are not captured" in mesh.log(rank) for rank in ranks)
    if way.drafts:
        positions = mesh.values("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        assert len(positions) == way.drafts
        assert positions[-1] > 0, "the last draft was never kept"
    if way.dp > 1:
        steps = mesh.values("glm_mesh:replica_steps_total")
        assert len(steps) == way.dp
        assert min(steps) > 10


@pytest.fixture(scope="module")
def plain() -> Answers:
    """Asked twice: what else runs beside a request changes nothing either."""

    def ask_twice(mesh: Mesh) -> Answers:
        found = answers(mesh, ASKED)
        again = answers(mesh, list(reversed(ASKED)))
        assert not compare(ASKED, found, again).near_ties
        return found

    return run(PLAIN, ask_twice)


def check(way: Way, plain: Answers) -> None:
    verdict = compare(ASKED, plain, run(way, lambda mesh: answers(mesh, ASKED)))
    print(
        f"{way}: {verdict.num_compared} tokens, largest error {verdict.largest_error:.1e}, "
        f"near ties: {verdict.near_ties or 'none'}"
    )
    # Where nothing is near a tie all is compared; more than a few near ties are no accident.
    assert len(verdict.near_ties) <= 2
    assert verdict.num_compared > 400


@pytest.mark.timeout(400)  # four ranks share few cores, and the plain way is started first
@pytest.mark.parametrize("way", FEW[1:], ids=str)
def test_the_same_tokens_with_each_option(way: Way, plain: Answers) -> None:
    check(way, plain)


@pytest.mark.soak
@pytest.mark.parametrize("way", ALL[1:], ids=str)
def test_the_same_tokens_with_every_two_options(way: Way, plain: Answers) -> None:
    check(way, plain)


def answer(*token_ids: int, margin: float = 5.0, logprob: float = -0.5) -> list[Answer]:
    count = len(token_ids)
    return [Answer(token_ids, [logprob] * count, [margin] * count, "length")]


GREEDY, SAMPLED = Request("greedy", {}), Request("sampled", {}, is_greedy=False)


def judged(ours: list[Answer], theirs: list[Answer], request: Request = GREEDY) -> Verdict:
    return compare([request], {request.name: ours}, {request.name: theirs})


def test_another_token_is_a_mistake_unless_two_logits_are_close() -> None:
    with pytest.raises(AssertionError, match="greedy, token 1: 2 and 3"):
        judged(answer(1, 2), answer(1, 3))
    close = ROUNDING
    verdict = judged(answer(1, 2, 9, margin=close), answer(1, 3, 4, margin=close))
    assert verdict.num_compared == 1, "what follows is another text"
    assert len(verdict.near_ties) == 1
    with pytest.raises(AssertionError, match="sampled, token 0"):
        judged(answer(1, margin=close), answer(2, margin=close), SAMPLED)


def test_other_logprobs_lengths_and_ends_are_mistakes() -> None:
    with pytest.raises(AssertionError, match="logprobs"):
        judged(answer(1), answer(1, logprob=-0.5 - 2 * ROUNDING))
    with pytest.raises(AssertionError, match="longer"):
        judged(answer(1, 2), answer(1))
    ended = [Answer([1], [-0.5], [5.0], "stop")]
    with pytest.raises(AssertionError, match="greedy"):
        judged(answer(1), ended)
    assert judged(answer(1, 2), answer(1, 2)).num_compared == 2
