"""Where a fit starts: one table of how far the run has come, how many fits ran before, and whether it may be resumed."""

import pytest

from redeqx.training import Position, start

IN_EPOCH = Position(1, 2, 24)  # fit 1, epoch 2, after 24 examples


@pytest.mark.parametrize(
    ("known", "fit_index", "may_resume", "expected"),
    [
        # Nothing is known: a new fit, the first of the script or a later one.
        (None, 0, True, Position(0)),
        (None, 0, False, Position(0)),
        (None, 2, True, Position(2)),
        # Within the first fit, and at its beginning: saved by a loop of updates before it.
        (Position(0, 1, 8), 0, True, Position(0, 1, 8)),
        (Position(0), 0, True, Position(0)),
        # Within the second fit.
        (IN_EPOCH, 0, True, None),  # finished before
        (IN_EPOCH, 1, True, IN_EPOCH),  # interrupted
        (IN_EPOCH, 1, False, Position(2)),  # interrupted, and abandoned
        (IN_EPOCH, 2, True, Position(2)),  # the loaded run had fewer fits, or this process has finished them
        (IN_EPOCH, 2, False, Position(2)),
    ],
)
def test_start(known, fit_index, may_resume, expected):
    assert start(known, fit_index, may_resume=may_resume) == expected
