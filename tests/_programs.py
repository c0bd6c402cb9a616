"""Computes many small functions in one program: to compile takes longer than to compute."""

import jax
import numpy as np


def computed(cases, **options):
    """Returns what functions return, by name. A case is a function and its arguments; `options` are those of `jax.jit`."""
    run = jax.jit(lambda given: {name: fn(*given[name]) for name, (fn, _) in cases.items()}, **options)
    return run({name: tuple(args) for name, (_, args) in cases.items()})


def assert_all_close(found, wanted, **tolerances):
    """Compares two trees of arrays, whose outermost level are the names of cases."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected), strict=True):
            assert np.shape(a) == np.shape(b), name
            np.testing.assert_allclose(a, b, err_msg=name, **tolerances)
