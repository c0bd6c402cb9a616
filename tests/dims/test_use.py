"""The text of the verdict about rows."""

import pytest

from redeqx.dims import RowUse, Whole


@pytest.mark.parametrize(
    "use, text",
    [
        (RowUse("separable", 0), "separable"),
        (RowUse("separable", 1), "a sum over rows"),
        (RowUse("separable", 0, group=2), "separable, 2 rows at a time"),
        (RowUse("after", 0, whole=(Whole(3, ()), Whole(5, ()))), "separable after 2 values of the whole batch"),
        (RowUse("after", 1, whole=(Whole(3, ()),)), "separable after 1 value of the whole batch"),
        (
            RowUse("separable", 0, group=2, metrics=("metric `auc` mixes at train.py:41", "metric `top` mixes rows")),
            "separable, 2 rows at a time; metric `auc` mixes at train.py:41; metric `top` mixes rows",
        ),
        (
            RowUse("mixed", 0, line="train.py:41", why="a reduction over rows"),
            "mixed at train.py:41 (a reduction over rows)",
        ),
        (RowUse("mixed", 0), "mixed"),
        (RowUse("unknown", 0), "unknown"),
        (RowUse("unknown", 0, why="a callback"), "unknown: a callback"),
        (RowUse("unknown", 0, line="train.py:41", why="a callback"), "unknown at train.py:41 (a callback)"),
    ],
)
def test_a_verdict_reads_as_one_line(use, text):
    assert use.text == text
