"""Where a fit starts: one table of what is known of a run, how many fits ran before, and whether it may be resumed."""

import pathlib

import pytest

from redeqx.training import Done, Known, Position, Refused, Start, start

SAVED = pathlib.Path("ckpts/step_00000003")
IN_EPOCH = Position(1, 2, 24)  # fit 1, epoch 2, after 24 examples


@pytest.mark.parametrize(
    ("known", "fit_index", "may_resume", "expected"),
    [
        # Nothing is known: a new fit, the first of the script or a later one.
        (None, 0, True, Start(Position(0))),
        (None, 0, False, Start(Position(0))),
        (None, 2, True, Start(Position(2))),
        # A checkpoint of an earlier process.
        (Known(Position(0, 1, 8), SAVED), 0, True, Start(Position(0, 1, 8))),
        (Known(IN_EPOCH, SAVED), 0, True, Done()),
        (Known(IN_EPOCH, SAVED), 1, True, Start(IN_EPOCH)),
        (Known(IN_EPOCH, SAVED), 2, True, Start(Position(2))),  # the loaded run had fewer fits
        (Known(Position(0), SAVED), 0, True, Start(Position(0))),  # saved by a loop of updates before the fit
        (Known(IN_EPOCH, SAVED), 0, False, Refused(SAVED)),
        (Known(Position(0), SAVED), 0, False, Refused(SAVED)),
        # What this process has trained.
        (Known(IN_EPOCH), 1, True, Start(IN_EPOCH)),  # interrupted
        (Known(IN_EPOCH), 1, False, Start(Position(2))),  # interrupted, and abandoned
        (Known(IN_EPOCH), 2, True, Start(Position(2))),  # finished
        (Known(IN_EPOCH), 2, False, Start(Position(2))),
        (Known(IN_EPOCH), 0, True, Done()),
    ],
)
def test_start(known, fit_index, may_resume, expected):
    assert start(known, fit_index, may_resume=may_resume) == expected


def test_a_start_is_new_at_the_beginning_of_a_fit():
    assert Start(Position(3)).is_new
    assert not Start(IN_EPOCH).is_new and not Start(Position(3, 1)).is_new
