"""`MixtureOfExperts`: values and gradients by a loop over tokens and experts, the routing, drops, `jax.vmap`, training."""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
import redeqx.dims
from redeqx.models import lora
from redeqx.models.nn import MixtureOfExperts, add_routing

D, HIDDEN, EXPERTS, CHOSEN, SEQ, ROWS = 6, 5, 4, 2, 9, 3
LAYERS = {
    "mixtral": {},
    "weights as they are": {"renormalize": False},
    "plain": {"is_gated": False, "activation": jax.nn.gelu},
    "deepseek": {
        "score": "sigmoid",
        "scale": 2.5,
        "has_correction": True,
        "d_shared": 7,
        "n_groups": 2,
        "n_chosen_groups": 1,
    },
    "deepseek-v2": {"n_groups": 2, "n_chosen_groups": 1, "d_shared": 3},
    "sparsemixer": {"score": "sparsemixer", "jitter": 0.3, "renormalize": False},
    "limited": {"capacity_factor": 0.75, "d_shared": 3, "gates_shared": True, "use_bias": True, "limit": 0.4},
    "gpt-oss": {"use_bias": True, "limit": 0.4, "activation": lambda x: x * jax.nn.sigmoid(1.702 * x)},
}


build = eqx.filter_jit(MixtureOfExperts)


def make(**options):
    layer = build(D, HIDDEN, EXPERTS, CHOSEN, init_std=0.5, key=jax.random.key(0), **options)
    if layer.correction is not None:
        layer = eqx.tree_at(lambda layer: layer.correction, layer, jnp.array([0.3, -0.2, 0.1, -0.4]))
    if layer.router.bias is not None:
        of = lambda layer: [x.bias for x in (layer.router, layer.experts.gate, layer.experts.up, layer.experts.down)]  # noqa: E731
        layer = eqx.tree_at(of, layer, [0.5 * jnp.cos(jnp.arange(x.size).reshape(x.shape)) for x in of(layer)])
    return layer


run = eqx.filter_jit(lambda layer, x: layer(x))


def tokens(*dims, seed=1):
    return jax.random.normal(jax.random.key(seed), (*dims, D))


def choices(layer, x, mask):
    """Returns which experts each token asked for, and which ones took it, as booleans `[seq, experts]`, by a loop."""
    scores = np.array(scores_of(layer, x)[1] + (0 if layer.correction is None else layer.correction))
    asked, given = np.zeros(scores.shape, bool), np.zeros(scores.shape, bool)
    factor = math.inf if layer.capacity_factor is None else layer.capacity_factor
    limit = np.ceil(factor * mask.sum() * CHOSEN / EXPERTS)
    for token in np.flatnonzero(mask):
        if layer.n_groups == 2:  # of two experts each, of which one is chosen
            pairs = scores[token].reshape(2, 2)
            best = pairs.sum(1) if layer.score == "sigmoid" else pairs.max(1)
            scores[token, [2, 3] if best[0] >= best[1] else [0, 1]] = -np.inf
        for expert in np.argsort(-scores[token], kind="stable")[:CHOSEN]:
            asked[token, expert] = True
            given[token, expert] = given[:, expert].sum() < limit
    return asked, given


def affine(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def scores_of(layer, x):
    logits = affine(layer.router, x)
    return logits, jax.nn.sigmoid(logits) if layer.score == "sigmoid" else jax.nn.softmax(logits)


def sparsely_mixed(logits, jitter):
    """Returns the weight of each expert among those that are not larger, and close to it."""
    each, others = logits[:, :, None], logits[:, None]
    is_close = (others <= each) & ((each - others) / jnp.maximum(jnp.abs(others), each) <= 2 * jitter)
    return 1 / jnp.where(is_close, jnp.exp(others - each), 0).sum(-1)


def by_hand(layer, x, *, asked, given, mask):
    """Computes the layer for one sequence `[seq, d]` by a loop over the experts, each of all tokens, and its routing."""
    logits, scores = scores_of(layer, x)
    mixed = sparsely_mixed(logits, layer.jitter) if layer.score == "sparsemixer" else scores
    weights = jnp.where(asked, mixed, 0)
    total = jnp.where(mask[:, None], weights.sum(-1, keepdims=True), 1)
    weights = layer.scale * (weights / total if layer.renormalize else weights)

    def mlp(expert, x):
        up, gate = affine(expert.up, x), 0 if expert.gate is None else affine(expert.gate, x)
        if expert.limit is not None:
            up, gate = jnp.clip(up, -expert.limit, expert.limit) + 1, jnp.minimum(gate, expert.limit)
        hidden = expert.activation(up) if expert.gate is None else expert.activation(gate) * up
        return affine(expert.down, hidden)

    y = jnp.zeros_like(x) if layer.shared is None else mlp(layer.shared, x)
    y *= 1 if layer.shared_gate is None else 1 / (1 + jnp.exp(-affine(layer.shared_gate, x)))
    for expert, own in enumerate(jax.vmap(mlp, (0, None))(layer.experts, x)):
        y += jnp.where(given[:, expert, None], weights[:, expert, None] * own, 0)
    n, shares = mask.sum(), scores / scores.sum(-1, keepdims=True)
    per_expert = asked.sum(0)
    excess = 0.0 if layer.correction is None else (per_expert - n * CHOSEN / EXPERTS) @ layer.correction
    return y, {
        "tokens": n,
        "balance": n * EXPERTS * jnp.sum(per_expert / n * jnp.where(mask[:, None], shares, 0).sum(0) / n),
        "z": jnp.sum(jnp.where(mask, jnp.log(jnp.exp(logits).sum(-1)) ** 2, 0)),
        "dropped": (asked.sum() - given.sum()) / CHOSEN,
        "imbalance": n * per_expert.max() / (n * CHOSEN / EXPERTS),
        "correction": excess - jax.lax.stop_gradient(excess),
    }


def assert_close(found, wanted, tolerance=1e-6):
    """Compares each leaf with the largest number of that leaf."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error, scale = np.abs(np.asarray(a) - np.asarray(b)).max(), np.abs(np.asarray(b)).max()
        assert error <= tolerance * max(scale, 1), f"{jax.tree_util.keystr(path)}: {error} of {scale}"


def total_of(outputs):
    """A number that depends on every output and on the differentiable fields of the routing."""
    y, routing = outputs
    routing = routing if isinstance(routing, dict) else vars(routing)
    weights = jnp.cos(jnp.arange(y.size).reshape(y.shape))
    return jnp.sum(y * weights) + jnp.sum(0.1 * routing["balance"] + 0.01 * routing["z"] + 0.3 * routing["correction"])


def values_and_gradients(fn, layer, x):
    """Returns the outputs, and the gradients of `total_of` with respect to the layer and `x`."""

    def total(args):
        outputs = fn(*args)
        return total_of(outputs), outputs

    (_, outputs), gradient = eqx.filter_jit(eqx.filter_value_and_grad(total, has_aux=True))((layer, x))
    return outputs, gradient


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.sweep] * (name != "deepseek")) for name in LAYERS],
)
def test_a_sequence_is_that_of_a_loop_over_the_experts(name):
    layer, x, is_masked = make(**LAYERS[name]), tokens(SEQ), name in ("plain", "deepseek", "limited")
    mask = np.arange(SEQ) % 4 != 1 if is_masked else np.ones(SEQ, bool)
    asked, given = choices(layer, x, mask)
    dense = partial(by_hand, asked=asked, given=given, mask=mask)
    sparse = lambda layer, x: layer(x, mask=jnp.asarray(mask) if is_masked else None)  # noqa: E731
    (y, routing), gradient = values_and_gradients(sparse, layer, x)
    (expected, of_routing), expected_gradient = values_and_gradients(dense, layer, x)
    assert_close(y, expected)
    assert_close(vars(routing), of_routing)
    assert (routing.dropped > 0) == (layer.capacity_factor is not None)
    assert_close(gradient, expected_gradient)


# --- several sequences ------------------------------------------------------------------------------------------------


def one_by_one(layer, x):
    return jax.lax.map(lambda x: jax.lax.map(layer, x), x)


FORMS = {
    "a batch": lambda layer, x: layer(x),
    "vmap of a jit": lambda layer, x: jax.vmap(jax.vmap(jax.jit(lambda x: layer(x))))(x),
    "vmap over other dims": lambda layer, x: jax.vmap(jax.vmap(layer), 1, 1)(x),
}


@pytest.mark.sweep
def test_a_batch_is_its_sequences_one_by_one():
    layer, x = make(**LAYERS["deepseek"], capacity_factor=1.0), tokens(2, ROWS, SEQ)
    expected = values_and_gradients(one_by_one, layer, x)
    assert expected[0][1].dropped.shape == (2, ROWS)
    for form in FORMS.values():
        assert_close(values_and_gradients(form, layer, x), expected)


@pytest.mark.sweep
def test_gradients_by_row():
    layer, x = make(), tokens(ROWS, SEQ)

    def gradient(x):
        return eqx.filter_grad(lambda layer: total_of(layer(x)))(layer)

    assert_close(jax.jit(jax.vmap(gradient))(x), jax.lax.map(gradient, x))


@pytest.mark.sweep
def test_an_ensemble_of_layers():
    layer, x = make(), tokens(SEQ)
    other = eqx.tree_at(lambda layer: layer.experts.up.weight, layer, -layer.experts.up.weight)
    both = jax.tree.map(lambda *of: jnp.stack(of), layer, other)
    y = eqx.filter_jit(eqx.filter_vmap(lambda layer, x: layer(x)[0], in_axes=(eqx.if_array(0), None)))(both, x)
    assert_close(y, jnp.stack([run(layer, x)[0], run(other, x)[0]]))


@pytest.mark.sweep
def test_one_token():
    layer, x = make(d_shared=3), tokens(SEQ)
    y, routing = run(layer, x[2])
    assert_close(y, run(layer, x)[0][2])
    assert routing.tokens == 1 and routing.imbalance == EXPERTS / CHOSEN
    assert_close(jax.jit(jax.vmap(lambda x: layer(x)[0]))(x), run(layer, x)[0])


@pytest.mark.sweep
def test_bfloat16_weights_choose_by_float32_scores():
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_array(leaf) else leaf, make(d_shared=3))
    y, routing = run(layer, tokens(SEQ).astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and {leaf.dtype for leaf in jax.tree.leaves(routing)} == {jnp.dtype("float32")}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if eqx.is_array(leaf) else leaf, layer)
    expected, _ = wide(tokens(SEQ).astype(jnp.bfloat16).astype(jnp.float32))
    assert np.abs(y.astype(jnp.float32) - expected).max() < 0.03 * np.abs(expected).max()


def test_an_exact_router_of_16_bits_chooses_as_one_of_float32():
    layer = make(score="sigmoid", has_correction=True, d_shared=3, wide=("router", "correction"))
    x = tokens(ROWS, SEQ).astype(jnp.bfloat16)
    layer = eqx.tree_at(lambda layer: layer.correction, layer, 5 + 0.01 * tokens(EXPERTS)[:, 0])
    scores = jax.nn.sigmoid(x.astype(jnp.float32) @ layer.router.weight.T) + layer.correction
    counts = (np.argsort(-scores, axis=-1)[..., :CHOSEN, None] == np.arange(EXPERTS)).sum((1, 2)).max(-1)

    def imbalance(layer, batch, key):
        y, routing = jax.vmap(layer)(batch.astype(layer.experts.up.weight.dtype))
        return redeqx.Loss(routing.imbalance.sum() + 0 * y.astype(jnp.float32).sum(), jnp.float32(len(batch)))

    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False),
        model=layer,
        collate_fn=lambda examples: np.stack(examples),
        loss_fn=imbalance,
        optimizer=optax.sgd(0.0),
        compute="bfloat16",
    )
    found = trainer.eval_loss(list(np.asarray(x, np.float32)), per_device_batch_size=1)
    assert found == pytest.approx(np.mean(counts) * EXPERTS / CHOSEN, rel=1e-6)


@pytest.mark.sweep
def test_adapters_of_experts():
    layer, x = make(d_shared=3), tokens(ROWS, SEQ)
    adapted = lora.add(layer, rank=2, where="*", key=jax.random.key(1))
    assert_close(run(adapted, x), run(layer, x))
    drawn = [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(jax.tree.leaves(adapted))]
    trained = jax.tree.map(
        lambda is_trained, leaf, new: 0.3 * new if is_trained else leaf,
        lora.trainable(adapted), eqx.filter(adapted, eqx.is_array), jax.tree.unflatten(jax.tree.structure(adapted), drawn),
    )  # fmt: skip
    trained = eqx.combine(trained, adapted)
    assert np.abs(run(trained, x)[0] - run(layer, x)[0]).max() > 0.1
    assert_close(run(trained, x)[0], run(lora.merge(trained), x)[0], 1e-5)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_add_routing_sums_over_layers_and_means_metrics():
    loss = redeqx.Loss(jnp.float32(10.0), jnp.float32(5.0), {"correct": jnp.float32(3.0)})
    layers = [run(make(), tokens(ROWS, SEQ, seed=seed))[1] for seed in (1, 2)]
    found = add_routing(loss, layers, balance_loss=0.5, z_loss=0.25)
    balance, z = (sum(float(getattr(r, name).sum()) for r in layers) for name in ("balance", "z"))
    assert_close(found.total, 10.0 + 0.5 * balance + 0.25 * z)
    assert found.weight == 5.0 and found.metrics["correct"] == 3.0
    n = 2 * ROWS * SEQ
    assert_close(found.metrics["balance_loss"], (balance, n))
    assert_close(found.metrics["router_z_loss"], (z, n))
    assert found.metrics["dropped"] == (0.0, n)
    stacked = jax.tree.map(lambda *of: jnp.stack(of), *layers)
    assert_close(jax.tree.leaves(add_routing(loss, stacked)), jax.tree.leaves(add_routing(loss, layers)))


def test_a_balanced_router_has_the_least_balance_loss():
    layer = make()
    even = eqx.tree_at(lambda layer: layer.router.weight, layer, jnp.eye(EXPERTS, D))
    one_hot = jnp.tile(jnp.eye(D)[:EXPERTS] + 0.5 * jnp.roll(jnp.eye(D)[:EXPERTS], 1, 0), (3, 1))
    routing = run(even, one_hot)[1]
    assert_close(routing.balance / routing.tokens, float(CHOSEN))
    assert_close(routing.imbalance / routing.tokens, 1.0)
    skewed = run(even, jnp.tile(one_hot[:1], (12, 1)))[1]
    assert skewed.balance > 1.2 * routing.balance
    assert skewed.imbalance / skewed.tokens == EXPERTS / CHOSEN


@pytest.mark.parametrize("options", [{}, {**LAYERS["deepseek"], "capacity_factor": 1.0}], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize("form", [lambda layer, *args: layer(*args[:1], mask=args[1]), "vmap"], ids=["a batch", "vmap"])
def test_the_loss_is_known_to_be_a_sum_over_rows(form, options):
    """So a batch may be cut into micro-batches and devices."""
    params, static = eqx.partition(make(**options), eqx.is_array)
    call = (lambda layer, x, mask: jax.vmap(lambda x, mask: layer(x, mask=mask))(x, mask)) if form == "vmap" else form

    def loss(params, state, batch, key):
        y, routing = call(eqx.combine(params, static), batch["x"], batch["mask"])
        loss = add_routing(redeqx.Loss(jnp.sum(y**2), batch["mask"].sum()), routing, z_loss=0.1)
        return loss.total, loss.weight, loss.metrics

    batch = {"x": tokens(8, SEQ), "mask": jnp.ones((8, SEQ), bool)}
    use = redeqx.dims.row_use(loss, params, None, batch, jax.random.key(0))
    assert use.kind == "separable" and not use.metrics and not use.gathers, use.text


def test_a_correction_balances_the_experts():
    """Adam on its gradient alone: the router and the experts stay as they are."""
    layer = make(score="sigmoid", has_correction=True)
    layer = eqx.tree_at(lambda layer: layer.correction, layer, jnp.array([2.0, 0.0, 0.0, 0.0]))
    x, optimizer = tokens(8, 64), optax.adam(0.05)
    state = optimizer.init(layer.correction)

    @eqx.filter_jit
    def update(correction, state):
        def loss_of(correction):
            y, routing = eqx.tree_at(lambda layer: layer.correction, layer, correction)(x)
            loss = add_routing(redeqx.Loss(0 * y.sum(), jnp.float32(y[..., 0].size)), routing, balance_loss=0.0)
            return loss.total / loss.weight, routing

        gradient, routing = jax.grad(loss_of, has_aux=True)(correction)
        change, state_ = optimizer.update(gradient, state)
        return correction + change, state_, routing.imbalance.sum() / routing.tokens.sum()

    correction, imbalances = layer.correction, []
    for _ in range(60):
        correction, state, imbalance = update(correction, state)
        imbalances.append(float(imbalance))
    assert imbalances[0] > 1.9 and min(imbalances[-5:]) < 1.45, imbalances


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_chosen": 5}, r"`n_chosen`: expected at most `n_experts`=4, got 5\. Choose fewer"),
        ({"n_experts": 0}, r"`n_experts`: expected at least 1, got 0\. Pass a positive size"),
        ({"d_shared": -1}, r"`d_shared`: expected at least 0, got -1\. Pass 0"),
        ({"n_groups": 3}, r"`n_groups`: expected a divisor of `n_experts`=4, got 3\. Make them equal"),
        ({"n_groups": 4}, r"`n_chosen_groups`: expected at most `n_groups`=4, with `n_chosen`=2 experts of 4, got 1\."),
        ({"score": "tanh"}, r"`score`: expected 'softmax', 'sigmoid' or 'sparsemixer', got 'tanh'\. Mixtral"),
        ({"capacity_factor": 0.0}, r"`capacity_factor`: expected a finite number above 0, got 0\.0\. Pass None"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(**{"d_model": D, "d_expert": 5, "n_experts": 4, "n_chosen": 2, **options}, key=jax.random.key(0))


@pytest.mark.sweep
def test_impossible_calls_are_refused():
    layer = make()
    with pytest.raises(ValueError, match=r"`mask`: expected the shape .* \(9,\), got \(8,\)\. Pass one boolean a token"):
        layer(tokens(SEQ), mask=jnp.ones(8, bool))
    with pytest.raises(TypeError, match=r"`routings`: expected a PyTree of `Routing`, got tuple|ArrayImpl.*Pass what"):
        add_routing(redeqx.Loss(jnp.float32(1.0), jnp.float32(1.0)), [run(layer, tokens(SEQ))[0]])

    class Other(eqx.nn.Linear):
        pass

    replaced = eqx.tree_at(lambda layer: layer.experts.up, layer, Other(D, HIDDEN, key=jax.random.key(0)))
    with pytest.raises(TypeError, match=r"`layer`: expected stacked `eqx.nn.Linear` layers, got Other\."):
        replaced(tokens(SEQ))
