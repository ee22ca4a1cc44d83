"""Mean squares of what each matrix is multiplied by: which of its weights matter."""

import torch
from torch import Tensor

# An expert that calibration seldom chose is judged by what all experts saw, as if that had been so
# many rows of its own.
_SHARED_ROWS = 64


class Moments:
    """Sums of squares per input column, for matrices that lie side by side (experts)."""

    def __init__(self, num_matrices: int, size_in: int) -> None:
        self._squares = torch.zeros(num_matrices, size_in)
        self._rows = torch.zeros(num_matrices)

    def add(self, rows: Tensor, counts: Tensor) -> None:
        """Take rows [A, in], sorted by matrix; `counts` says how many each has."""
        first = 0
        for matrix, count in enumerate(counts.tolist()):
            mine = rows[first : first + count]
            self._squares[matrix] += mine.float().square_().sum(0)
            first += count
        self._rows += counts

    def of(self, matrix: int) -> Tensor | None:
        """Mean squares [in] of one matrix's inputs; None when nothing was seen at all."""
        total = float(self._rows.sum())
        if not total:
            return None
        common = self._squares.sum(0) / total
        rows = float(self._rows[matrix])
        return (self._squares[matrix] + _SHARED_ROWS * common) / (rows + _SHARED_ROWS)
