"""Equal names mean equal tokens from the first one on, and nothing but tokens, model and salt."""

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.block_hashes import HASH_BYTES, BlockHashes, root_hash

ROOT = root_hash("m", 4, "")
NOTHING = array("I")


def names(prompt: list[int], output: list[int], num_blocks: int, root: bytes = ROOT) -> list[bytes]:
    hashes = BlockHashes(root, 4)
    hashes.extend(num_blocks, array("I", prompt), array("I", output))
    return hashes.known


def test_a_name_is_made_as_the_contract_says() -> None:
    root = sha256(b"glm-mesh.prefix.1\x004\x00m\x00salt").digest()
    assert root_hash("m", 4, "salt") == root
    first = sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 1, 0, 0])).digest()
    second = sha256(first + bytes([5, 0, 0, 0] * 4)).digest()
    assert names([1, 2, 3, 256, 5, 5, 5, 5, 9], [], 2, root) == [first, second]
    assert len(first) == HASH_BYTES


def test_each_part_of_the_root_sets_chains_apart() -> None:
    roots = [
        root_hash(*parts)
        for parts in (("m", 4, ""), ("n", 4, ""), ("m", 8, ""), ("m", 4, "s"), ("m\0s", 4, ""))
    ]
    assert len(set(roots)) == len(roots)
    assert len({names([1, 2, 3, 4], [], 1, root)[0] for root in roots}) == len(roots)


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(0, 15), max_size=6),
)
def test_names_depend_on_tokens_alone_however_they_came(
    prompt: list[int], output: list[int], stops: list[int]
) -> None:
    """In one go or in pieces, as prompt or as output."""
    tokens = prompt + output
    most = len(tokens) // 4
    pieces = BlockHashes(ROOT, 4)
    for stop in [*stops, most]:
        # Output grows between the calls.
        wanted = min(stop, most)
        known = output[: max(0, 4 * wanted - len(prompt))]
        pieces.extend(wanted, array("I", prompt), array("I", known))
    assert pieces.known == names(tokens, [], most)
    assert len(pieces.known) == most


@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(0, 11))
def test_another_token_changes_all_names_from_its_block_on(tokens: list[int], place: int) -> None:
    changed = list(tokens)
    changed[place] += 1
    same = [a == b for a, b in zip(names(tokens, [], 3), names(changed, [], 3), strict=True)]
    assert same == [block < place // 4 for block in range(3)]


def test_a_block_that_is_not_full_has_no_name() -> None:
    with pytest.raises(AssertionError, match="not full"):
        BlockHashes(ROOT, 4).extend(2, array("I", range(7)), NOTHING)


def test_an_output_can_grow_after_it_was_hashed() -> None:
    output = array("I", range(8))
    hashes = BlockHashes(ROOT, 4)
    hashes.extend(2, array("I", [1]), output)
    output.append(9)
    assert len(output) == 9
