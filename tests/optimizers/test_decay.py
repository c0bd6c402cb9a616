"""Weight decay by values: which leaves one update with a zero gradient shrinks, and what the header says of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import lora
from redeqx.optimizers import adamw, decay_mask, groups, muon
from tests._tree import named_leaves


class Recurrent(eqx.Module):
    """A recurrent cell between plain arrays, one of which is used through a function of it."""

    first: jax.Array
    lower: jax.Array
    gain: jax.Array
    norm: eqx.nn.LayerNorm
    cell: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, make_cell=eqx.nn.GRUCell):
        keys = jax.random.split(jax.random.key(0), 4)
        self.first, self.lower = jax.random.normal(keys[0], (4, 4)), jax.random.normal(keys[1], (4, 4))
        self.gain, self.norm = jnp.ones(4), eqx.nn.LayerNorm(4, use_weight=True)
        self.cell, self.head = make_cell(4, 8, key=keys[2]), eqx.nn.Linear(8, 2, key=keys[3])

    def __call__(self, x):
        x = jax.vmap(self.norm)(jnp.tanh(x @ self.first) * self.gain @ jnp.tril(self.lower))
        zeros = jnp.zeros(8)
        hidden = (zeros, zeros) if isinstance(self.cell, eqx.nn.LSTMCell) else zeros
        hidden, _ = jax.lax.scan(lambda hidden, x: (self.cell(x, hidden), None), hidden, x)
        return self.head(jax.tree.leaves(hidden)[0])


def shrunk(capsys, model, optimizer, **options):
    """Returns the names of the leaves that an update with a zero gradient changes, and the header's row on weight decay."""

    def loss_fn(model, batch, key):
        return 0 * (jax.vmap(model)(batch) ** 2).mean()

    def values(model):
        return {name: np.array(leaf, np.float32) for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)).items()}

    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=model, optimizer=optimizer, collate_fn=np.stack, loss_fn=loss_fn, **options
    )
    before = values(trainer.model)
    trainer.update([np.ones((5, 4), np.float32)] * 8)
    after = values(trainer.model)
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert all(np.linalg.norm(after[name]) < np.linalg.norm(before[name]) for name in changed)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "weight decay" in line]
    return changed, " ".join(row.replace("│", " ").split()).removeprefix("weight decay ")


WEIGHTS = {"first", "lower", "cell.weight_ih", "cell.weight_hh", "head.weight"}
ADAMW = {"learning_rate": 1e-2, "weight_decay": 0.5}


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, pytest.param(eqx.nn.LSTMCell, marks=pytest.mark.sweep)])
def test_what_the_loss_multiplies_with_data_decays(capsys, cell):
    model = Recurrent(cell)
    names, row = shrunk(capsys, model, optax.adamw(**ADAMW, mask=decay_mask))
    assert names == WEIGHTS
    leaves = named_leaves(eqx.filter(model, eqx.is_array))
    size = sum(leaves[name].size for name in WEIGHTS)
    assert row == f"5 of {len(leaves)} trained leaves, {size:,} parameters"
    assert {name for name, decays in named_leaves(decay_mask(model)).items() if decays} == WEIGHTS - {"first", "lower"}


def test_adapters_decay(capsys):
    model = lora.add(Recurrent(), rank=2, where="*", key=jax.random.key(1))
    model = eqx.tree_at(lambda m: m.head.lora_b, model, jnp.ones_like(model.head.lora_b))
    adapters, trainable = {"head.lora_a", "head.lora_b"}, lora.trainable(model)
    optimizer = optax.adamw(**ADAMW, mask=decay_mask)
    assert shrunk(capsys, model, optimizer, trainable=trainable) == (adapters, "2 of 2 trained leaves, 20 parameters")
    mask = named_leaves(decay_mask(eqx.filter(model, trainable)))
    assert {name for name, decays in mask.items() if decays} == adapters


def pulled_to_the_start(rate):
    """An optimizer whose state has a copy of the parameters, to which it pulls them: not towards zero."""

    def update(grads, start, params=None):
        return jax.tree.map(lambda grad, param, at: -rate * (grad + (param - at)), grads, params, start), start

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), update)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adamw(**ADAMW), None),
        pytest.param(optax.adam(1e-2), set(), marks=pytest.mark.sweep),
        pytest.param(optax.adamw(1e-2, weight_decay=0.0), set(), marks=pytest.mark.sweep),
        pytest.param(
            optax.stateless_with_tree_map(lambda grad, param: -1e-2 * (grad + 0.0 * param)), set(), marks=pytest.mark.sweep
        ),
        (pulled_to_the_start(1e-2), set()),
        pytest.param(optax.lamb(**ADAMW, mask=decay_mask), WEIGHTS, marks=pytest.mark.sweep),
        pytest.param(adamw(**ADAMW, moments="8bit", mask=decay_mask), WEIGHTS, marks=pytest.mark.sweep),
        (muon(**ADAMW), WEIGHTS),
        pytest.param(optax.MultiSteps(optax.adamw(**ADAMW, mask=decay_mask), 1), WEIGHTS, marks=pytest.mark.sweep),
        pytest.param(optax.masked(optax.adamw(**ADAMW), decay_mask), WEIGHTS, marks=pytest.mark.sweep),
        pytest.param(
            groups({"matrix": optax.adamw(**ADAMW)}, default=optax.sgd(1e-3)), {"cell.weight_ih", "cell.weight_hh"},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["all", "adam", "zero", "times zero", "to a copy", "lamb", "8bit", "muon", "multi", "masked", "groups"],
)  # fmt: skip
def test_the_header_counts_what_decays_under_any_optimizer(capsys, optimizer, expected):
    names, row = shrunk(capsys, Recurrent(), optimizer)
    if expected is None:
        assert {"norm.weight", "cell.bias", *WEIGHTS} <= names and row.startswith("11 of 11")
    else:
        assert names == expected
        assert row.startswith(f"{len(expected)} of 11") if expected else row == "none"


@pytest.mark.parametrize("rounding", ["master", pytest.param("stochastic", marks=pytest.mark.sweep)])
def test_the_header_counts_what_decays_with_bfloat16_parameters(capsys, rounding):
    precision = redeqx.Precision("float32", parameters="bfloat16", rounding=rounding)
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask=decay_mask)
    names, row = shrunk(capsys, Recurrent(), optimizer, compute=redeqx.Compute(precision))
    assert names == WEIGHTS and row.startswith("5 of 11")


@pytest.mark.sweep
def test_a_mask_knows_the_loss_after_a_prediction_too(capsys):
    """The model is then first placed without a loss, by the types of its layers."""
    model = Recurrent()
    for optimizer in (optax.adamw(**ADAMW, mask=decay_mask), optax.masked(optax.adamw(**ADAMW), decay_mask)):
        trainer = redeqx.Trainer(
            redeqx.Deployer(), model=model, optimizer=optimizer, collate_fn=np.stack,
            loss_fn=lambda model, batch, key: 0 * (jax.vmap(model)(batch) ** 2).mean(),
        )  # fmt: skip
        rows = [np.ones((5, 4), np.float32)] * 8
        trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch)).predict(rows, batch_size=8)
        assert "weight decay" not in capsys.readouterr().out
        trainer.update(rows)
        assert "weight decay: 5 of 11 trained leaves" in capsys.readouterr().out
        assert np.linalg.norm(trainer.model.lower) < np.linalg.norm(model.lower)
