"""Optimizers that know the layers of a model: Muon, AdamW with small moments, groups of leaves by kind; and averages.

Each is an optax transformation, for use in `optax.chain` and the like. Owns the computation of updates; `partition` owns the
kinds and shardings of leaves, and `training` calls the updates. Open `_muon.py` first, then `_groups.py`.

Public: `adamw`, `muon`, `ema`, `eval_params`, `with_eval_params`, `groups`, `kinds`, `of_kind`, `decay_mask`.
"""

from ._adamw import adamw as adamw
from ._averages import (
    ema as ema,
    eval_params as eval_params,
    has_eval_params as has_eval_params,
    with_eval_params as with_eval_params,
    with_new_averages as with_new_averages,
)
from ._groups import decay_mask as decay_mask, groups as groups, kinds as kinds, of_kind as of_kind
from ._muon import muon as muon
