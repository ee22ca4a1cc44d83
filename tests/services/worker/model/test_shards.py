"""Parts of matrices: every row and column of a matrix is on the ranks it should be on."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.model.placement import Placement
from services.worker.model.shards import Cut, Shard, Shards

SIZES = st.integers(1, 40)


@given(ranks=st.integers(1, 6), parts=st.lists(SIZES, min_size=1, max_size=3), size_in=SIZES)
def test_outputs_of_each_matrix_tile_it_and_the_product(
    ranks: int, parts: list[int], size_in: int
) -> None:
    named = {f"w{at}": size for at, size in enumerate(parts)}
    cuts = [
        Shards.cut(Placement(tp_size=ranks, tp_rank=rank), "p.", named, size_in, Cut.OUTPUTS)
        for rank in range(ranks)
    ]
    assert len({cut.size_out for cut in cuts}) == 1
    for at, size in enumerate(parts):
        rows = [row for cut in cuts for row in range(size)[cut.parts[at].rows]]
        assert rows == list(range(size))
    for cut in cuts:
        assert cut.size_in == size_in
        assert cut.adds_bias
        taken = [place for part in cut.parts for place in range(cut.size_out)[part.target]]
        assert len(taken) == len(set(taken))
        assert cut.is_padded == (len(taken) < cut.size_out)
        for part in cut.parts:
            assert part.target.stop - part.target.start == part.rows.stop - part.rows.start


def test_inputs_are_cut_and_one_rank_adds_the_bias() -> None:
    cuts = [
        Shards.cut(Placement(tp_size=2, tp_rank=rank), "p.", {"w": 6}, 8, Cut.INPUTS)
        for rank in range(2)
    ]
    assert [cut.parts[0].columns for cut in cuts] == [slice(0, 4), slice(4, 8)]
    assert [cut.adds_bias for cut in cuts] == [True, False]
    assert {(cut.size_in, cut.size_out) for cut in cuts} == {(4, 6)}


def test_what_every_rank_keeps_is_whole() -> None:
    placement = Placement(tp_size=4, tp_rank=3)
    (part,) = Shards.cut(placement, "p.", {"w": 6}, 8, Cut.WHOLE).parts
    assert part == Shard.whole("w", 6, 8)


def test_tensors_are_named_by_prefix_and_matrix() -> None:
    shards = Shards.cut(Placement(), "mlp.", {"gate_proj": 2, "up_proj": 2}, 3, Cut.WHOLE)
    assert [name for name, _ in shards.named()] == ["mlp.gate_proj.", "mlp.up_proj."]
    assert shards.names() == ("gate_proj", "up_proj")
