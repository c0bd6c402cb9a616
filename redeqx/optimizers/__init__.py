"""Optimizers that know the layers of a model: Muon, AdamW with small moments, and groups of leaves by kind.

Each is an optax transformation, for use in `optax.chain` and the like. Owns the computation of updates; `partition` owns the
kinds and shardings of leaves, and `training` calls the updates. Open `_muon.py` first, then `_groups.py`.
"""

from ._adamw import adamw as adamw
from ._groups import decay_mask as decay_mask, groups as groups, kinds as kinds, of_kind as of_kind
from ._muon import muon as muon
