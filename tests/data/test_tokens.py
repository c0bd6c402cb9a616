"""Rows of tokens: every token is in one, and segments number the documents."""

import numpy as np
import pytest

from redeqx.data import TokenRows


@pytest.mark.parametrize("n_tokens", [5, 6, 9, 10, 11, 23])
@pytest.mark.parametrize("stride", [None, 1, 4, 5])
def test_rows_contain_every_token(n_tokens, stride):
    rows = TokenRows(np.arange(n_tokens, dtype=np.uint16), 5, stride=stride)
    assert all(row.dtype == np.int32 and row.shape == (5,) for row in rows)
    assert {int(token) for row in rows for token in row} == set(range(n_tokens))
    starts = [int(row[0]) for row in rows]
    assert starts == sorted(set(starts)) and len(starts) == len(rows)
    assert starts[:-1] == [(stride or 5) * i for i in range(len(rows) - 1)] and starts[-1] == n_tokens - 5
    assert [row.tolist() for row in rows[1:]] == [row.tolist() for row in rows][1:]
    assert rows[-1].tolist() == rows[len(rows) - 1].tolist()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_segments_number_the_documents_in_a_row():
    rows = TokenRows(np.arange(12), 6, ends=np.array([2, 6, 6, 7, 11, 12]))
    assert [row["segments"].tolist() for row in rows] == [[1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 2, 3]]
    assert [row["tokens"].tolist() for row in rows] == [list(range(6)), list(range(6, 12))]
    assert rows[0]["segments"].dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_ends_of_any_integers(dtype):
    rows = TokenRows(np.zeros(40_000, np.int32), 10, ends=np.array([4, 12], dtype))
    assert [row["segments"].tolist() for row in rows[:2]] == [[1] * 4 + [2] * 6, [1] * 2 + [2] * 8]
    assert rows[-1]["segments"].tolist() == [1] * 10


def test_tokens_that_do_not_fit_raise():
    rows = TokenRows(np.array([1, 2, 3, 2**32 - 1], np.uint32), 2)
    assert rows[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"^`tokens`: expected integers of 32 bits, got 4294967295\. Look at"):
        rows[1]


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([1, 2], {}, TypeError, "`tokens`: expected a flat array of integers, got list. Pass those of all documents as one"),
        (np.ones(9), {}, TypeError, "`tokens`: expected a flat array of integers, got float64[9]."),
        (np.arange(3), {}, ValueError, "`tokens`: expected at least a row of 4, got 3. Pass a smaller `length`."),
        (np.arange(9), {"stride": 5}, ValueError, "`stride`: expected at most `length`, 4, got 5, which leaves tokens out."),
        (np.arange(9), {"stride": 0}, ValueError, "`stride`: expected at least 1 or None, got 0."),
    ],
)
def test_invalid_rows_raise(tokens, options, error, message):
    with pytest.raises(error) as raised:
        TokenRows(tokens, 4, **options)
    assert message in str(raised.value)
