"""Addressing of a flattened step for the torch versions."""

import torch

from services.worker.ops.paged import ROW_TILE, gather_rows, row_tiles


def tiles(query_lens: list[int], seq_lens: list[int], is_causal: bool = True) -> list:
    table = torch.arange(1, 1 + len(seq_lens) * 4).view(len(seq_lens), 4).to(torch.int32)
    return list(
        row_tiles(torch.tensor(query_lens).cumsum(0), torch.tensor(seq_lens), table, 128, is_causal)
    )


def test_a_row_sees_every_key_up_to_itself() -> None:
    first, second = tiles([3, 1], [10, 200])
    assert (first.first, first.last) == (0, 3)
    assert first.limits.tolist() == [8, 9, 10]
    assert second.limits.tolist() == [200]
    assert second.blocks.tolist() == [5, 6]


def test_without_a_causal_bound_every_row_sees_all() -> None:
    assert tiles([3], [10], is_causal=False)[0].limits.tolist() == [10, 10, 10]


def test_rows_of_an_empty_sequence_see_nothing() -> None:
    assert tiles([2], [0])[0].limits.tolist() == [0, 0]


def test_long_chunks_are_cut_into_tiles_of_bounded_size() -> None:
    cut = tiles([300], [400])
    assert [tile.last - tile.first for tile in cut] == [ROW_TILE, ROW_TILE, 300 - 2 * ROW_TILE]
    assert cut[-1].limits[-1] == 400


def test_rows_are_gathered_in_position_order() -> None:
    cache = torch.arange(6 * 128).view(6, 128, 1, 1).float()
    tile = tiles([1], [130])[0]
    rows = gather_rows(cache, tile).flatten().tolist()
    assert rows == [*range(128, 256), 256, 257]
