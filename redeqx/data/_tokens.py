"""Rows of a fixed length from a flat array of tokens, such as a `np.memmap` of a file: examples of language modelling."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from ..errors import check_count, filter_traceback


class TokenRows(Sequence[Any]):
    """Rows of `length` tokens, each `stride` tokens after the previous one; an object with `len()` and integer items.

    An item is an int32 array `[length]`; with `ends`, a dict of `tokens` and `segments`, both int32 arrays `[length]`.
    Segments number the documents within the row from 1, as attention masks expect them. The last row ends with the last
    token: it overlaps the previous one if tokens do not divide, so that no token is left out. Tokens are read on access.

    **Arguments:**

    - `tokens`: all tokens, one document after another, such as `np.memmap("train.bin", np.uint16, "r")`.
    - `length`: the length of a row, in tokens.
    - `stride`: by default `length`. `TokenRows(tokens, n + 1, stride=n)` makes each token but the first the target of
        exactly one prediction, if the model reads `row[:-1]` and predicts `row[1:]`.
    - `ends`: where each document ends, in tokens from the start; ascending.

    Raises TypeError for tokens that are not a flat array of integers, ValueError for fewer tokens than a row has, and for a
    stride that would leave tokens out; an item ValueError for a token that does not fit into 32 bits.
    """

    @filter_traceback
    def __init__(
        self,
        tokens: Integer[np.ndarray, " n_tokens"],
        length: int,
        *,
        stride: int | None = None,
        ends: Integer[np.ndarray, " n_documents"] | None = None,
    ):
        check_count(length, "length")
        check_count(stride, "stride", optional=True)
        _check_flat(tokens, "tokens", "Pass those of all documents as one array.")
        self._tokens, self._length = tokens, int(length)
        self._stride = self._length if stride is None else int(stride)
        if self._stride > self._length:
            raise ValueError(
                f"`stride`: expected at most `length`, {length}, got {stride}, which leaves tokens out. Pass a smaller one."
            )
        if ends is not None:
            _check_ends(ends, len(tokens))
        self._ends = None if ends is None else ends.astype(np.int64, copy=False)  # others overflow, or become floats
        if len(tokens) < self._length:
            raise ValueError(f"`tokens`: expected at least a row of {length}, got {len(tokens)}. Pass a smaller `length`.")
        self._n = 1 - (self._length - len(tokens)) // self._stride

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self._n))]
        start = min(range(self._n)[i] * self._stride, len(self._tokens) - self._length)
        tokens = self._tokens[start : start + self._length]
        row = np.array(tokens, np.int32)
        if (row != tokens).any():
            raise ValueError(f"`tokens`: expected integers of 32 bits, got {tokens[row != tokens][0]}. Look at their dtype.")
        return row if self._ends is None else {"tokens": row, "segments": self._segments(start)}

    def _segments(self, start: int) -> Int[np.ndarray, " length"]:
        assert self._ends is not None
        first, last = np.searchsorted(self._ends, (start + 1, start + self._length))
        cuts = np.unique(self._ends[first:last])  # an empty document ends where the previous one does
        lengths = np.diff(cuts - start, prepend=0, append=self._length)
        return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)


def _check_flat(array: Any, name: str, remedy: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"`{name}`: expected a flat array of integers, got {found}. {remedy}")


def _check_ends(ends: Any, n_tokens: int) -> None:
    _check_flat(ends, "ends", "Pass `np.cumsum(lengths)` of the documents' lengths.")
    ascend = (ends[1:] >= ends[:-1]).all()
    if len(ends) and not (ends[0] >= 0 and ends[-1] <= n_tokens and ascend):
        raise ValueError(
            f"`ends`: expected numbers that ascend from 0 to the {n_tokens} tokens, got {ends.min()} to {ends.max()}"
            f"{'' if ascend else ' in another order'}. Pass where each document ends, in tokens from the start."
        )
