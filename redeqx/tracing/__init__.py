"""Traced functions: jaxprs, what they contain, and their evaluation under other rules.

Owns the trace of a loss, the tables of primitives that have jaxprs inside, counts of FLOPs, and the interpreter. Knows
nothing of meshes, plans or training. Open `_jaxprs.py` first.
"""

from ._jaxprs import (
    Change as Change,
    Trace as Trace,
    all_inside as all_inside,
    as_fun as as_fun,
    called as called,
    evaluate as evaluate,
    keep_everything as keep_everything,
    matmul_flops as matmul_flops,
    product_flops as product_flops,
    remat_loops as remat_loops,
    rewrite as rewrite,
    run as run,
    scan_counts as scan_counts,
    shapes_in as shapes_in,
    value_of as value_of,
)
