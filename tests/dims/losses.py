"""Losses in the styles that people write them, for the verdict about their rows; `test_verdicts.py` judges them by numbers.

Each is `loss_fn(weights, batch, key)`. Dims: R rows, T positions, D features, V classes.
"""

from dataclasses import dataclass
from functools import partial

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import redeqx
from redeqx.kernels import grouped_matmul

T, D, V = 6, 8, 5


@dataclass(frozen=True)
class Case:
    """A loss and what the verdict about it is.

    **Arguments:**

    - `kind`, `degree`, `group`: as of `RowUse`.
    - `is_cautious`: whether the rows could be cut, by numbers, but the verdict does not say so.
    """

    loss_fn: object
    kind: str
    degree: int = 0
    group: int = 1
    is_cautious: bool = False


CASES: dict[str, Case] = {}


def case(kind, degree=0, group=1, *, is_cautious=False):
    def add(loss_fn):
        assert loss_fn.__name__ not in CASES
        CASES[loss_fn.__name__] = Case(loss_fn, kind, degree, group, is_cautious)
        return loss_fn

    return add


separable, after, mixed, unknown = map(case, ("separable", "after", "mixed", "unknown"))
a_sum = case("separable", 1)
cautious = case("mixed", is_cautious=True)


def batch_of(n_rows):
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(n_rows, T, D)).astype(np.float32),
        "y": draw.normal(size=(n_rows, T, D)).astype(np.float32),
        "ids": draw.integers(0, V, (n_rows, T)).astype(np.int32),
        "label": draw.integers(0, V, n_rows).astype(np.int32),
        "mask": draw.random((n_rows, T)) < 0.7,
        "reward": draw.normal(size=n_rows).astype(np.float32),
    }


def weights():
    shapes = {"w": (D, D), "u": (D, D), "v": (D,), "head": (D, V), "emb": (V, D), "layers": (3, D, D), "kernel": (3, D, D)}
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return {name: 0.4 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def token_losses(p, batch):
    """Cross-entropies `[R, T]`."""
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(batch["x"] @ p["w"]) @ p["head"], batch["ids"])


def row_losses(p, batch):
    """Cross-entropies `[R]`."""
    return optax.softmax_cross_entropy_with_integer_labels(features(p, batch["x"]) @ p["head"], batch["label"])


def features(p, x):
    return jnp.tanh(x.mean(-2) @ p["w"])


def scores(p, batch):
    return features(p, batch["x"]) @ p["v"]


# --- means ---------------------------------------------------------------------------------------------------------------


@separable
def mean_of_tokens(p, batch, key):
    return token_losses(p, batch).mean()


@separable
def an_inverse_of_weights(p, batch, key):
    """In the gradient, the right-hand sides are sums over rows."""
    lower = jnp.linalg.cholesky(p["w"] @ p["w"].T + jnp.eye(D))
    return jnp.tanh(batch["x"].mean(1) @ jnp.linalg.inv(lower) @ p["v"]).mean()


@separable
def a_filter_whose_covariances_are_shared(p, batch, key):
    def step(covariance, x):
        gain = jnp.linalg.solve(covariance, x @ p["u"])
        return p["w"] @ covariance @ p["w"].T + jnp.eye(D), gain.sum()

    return jax.vmap(lambda xs: lax.scan(step, jnp.eye(D), xs)[1].sum())(batch["x"]).mean()


@separable
def conjugate_gradients(p, batch, key):
    solution = jax.scipy.sparse.linalg.cg(p["w"] @ p["w"].T + jnp.eye(D), p["v"])[0]
    return jnp.tanh(batch["x"].mean(1) @ solution).mean()


@separable
def mean_of_means(p, batch, key):
    return token_losses(p, batch).mean(1).mean()


@separable
def a_redeqx_loss_by_tokens(p, batch, key):
    losses = token_losses(p, batch)
    return redeqx.Loss((losses * batch["mask"]).sum(), batch["mask"].sum(), {"tokens": batch["mask"].sum()})


@separable
def divided_by_the_shape(p, batch, key):
    return row_losses(p, batch).sum() / batch["x"].shape[0]


@separable
def divided_by_len(p, batch, key):
    return jnp.sum(row_losses(p, batch)) / len(batch["x"])


@separable
def divided_by_an_array(p, batch, key):
    return row_losses(p, batch).sum() / jnp.array(batch["x"].shape[0])


@separable
def multiplied_by_the_inverse(p, batch, key):
    return row_losses(p, batch).sum() * (1.0 / batch["x"].shape[0])


@separable
def divided_by_a_product_of_sizes(p, batch, key):
    return token_losses(p, batch).sum() / np.prod(batch["ids"].shape)


@separable
def divided_by_the_size_of_the_array(p, batch, key):
    losses = token_losses(p, batch)
    return losses.sum() / losses.size


@separable
def divided_before_the_sum(p, batch, key):
    return jnp.sum(row_losses(p, batch) / len(batch["x"]))


@separable
def dot_with_equal_shares(p, batch, key):
    losses = row_losses(p, batch)
    return losses @ jnp.full(losses.shape, 1 / len(losses))


@case("after")
def divided_by_counted_ones(p, batch, key):
    losses = row_losses(p, batch)
    return losses.sum() / jnp.ones_like(losses).sum()


@a_sum
def a_sum_of_rows(p, batch, key):
    return row_losses(p, batch).sum()


@a_sum
def a_sum_of_tokens_by_einsum(p, batch, key):
    return jnp.einsum("rt,rt->", token_losses(p, batch), batch["mask"].astype(jnp.float32))


@a_sum
def a_mean_times_len(p, batch, key):
    return row_losses(p, batch).mean() * len(batch["x"])


@mixed
def divided_by_the_root_of_len(p, batch, key):
    return row_losses(p, batch).sum() / len(batch["x"]) ** 0.5


@separable
def a_mean_plus_a_sum(p, batch, key):
    losses = row_losses(p, batch)
    return losses.mean() + 0.01 * losses.sum()


@separable
def a_mean_plus_weight_decay(p, batch, key):
    return row_losses(p, batch).mean() + 0.01 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


@a_sum
def a_sum_plus_weight_decay(p, batch, key):
    return row_losses(p, batch).sum() + 0.01 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


@separable
def a_sum_plus_noise_divided_by_len(p, batch, key):
    return (row_losses(p, batch).sum() + jax.random.normal(key)) / len(batch["x"])


# --- masked means --------------------------------------------------------------------------------------------------------


@after
def masked_in_a_checkpoint(p, batch, key):
    @jax.checkpoint
    def loss(p, batch):
        return (token_losses(p, batch) * batch["mask"]).sum() / batch["mask"].sum()

    return loss(p, batch)


@after
def mixup_in_nested_checkpoints(p, batch, key):
    """The order of the rows is drawn inside."""

    @eqx.filter_checkpoint
    def mixed_up(x, key):
        return 0.7 * x + 0.3 * x[jax.random.permutation(key, len(x))]

    @eqx.filter_checkpoint
    def loss(p, x, key):
        order_key, key = jax.random.split(key)
        x = mixed_up(x, order_key) * jax.random.bernoulli(key, 0.8, x.shape)
        return (jax.nn.relu(x @ p["w"]) @ p["v"]).mean()

    return loss(p, batch["x"], key)


@after
def masked_by_product(p, batch, key):
    return (token_losses(p, batch) * batch["mask"]).sum() / batch["mask"].sum()


@after
def masked_by_where(p, batch, key):
    return jnp.where(batch["mask"], token_losses(p, batch), 0).sum() / jnp.maximum(batch["mask"].sum(), 1)


@after
def masked_by_mean_where(p, batch, key):
    return token_losses(p, batch).mean(where=batch["mask"])


@after
def masked_by_average(p, batch, key):
    return jnp.average(token_losses(p, batch), weights=batch["mask"].astype(jnp.float32))


@after
def masked_by_a_ratio_of_means(p, batch, key):
    return (token_losses(p, batch) * batch["mask"]).mean() / (batch["mask"].mean() + 1e-8)


@after
def masked_by_normalised_weights(p, batch, key):
    share = batch["mask"] / batch["mask"].sum()
    return (share * token_losses(p, batch)).sum()


@after
def masked_by_dot(p, batch, key):
    mask = batch["mask"].astype(jnp.float32).ravel()
    return jnp.vdot(token_losses(p, batch).ravel(), mask) / mask.sum()


@separable
def masked_in_each_row(p, batch, key):
    mask = batch["mask"]
    return ((token_losses(p, batch) * mask).sum(1) / jnp.maximum(mask.sum(1), 1)).mean()


@mixed
def masked_by_nanmean(p, batch, key):
    return jnp.nanmean(jnp.where(batch["mask"], token_losses(p, batch), jnp.nan))


@after
def masked_by_ignored_labels(p, batch, key):
    labels = jnp.where(batch["mask"], batch["ids"], -100)
    is_counted = labels != -100
    return jnp.where(is_counted, token_losses(p, batch), 0.0).sum() / is_counted.sum()


@after
def weights_of_the_examples(p, batch, key):
    weight = jnp.exp(batch["reward"])
    return (weight / weight.sum() * row_losses(p, batch)).sum()


@after
def the_longest_mask(p, batch, key):
    longest = batch["mask"].sum(1).max()
    return (token_losses(p, batch) * (jnp.arange(T) < longest)).sum(1).mean() / longest


# --- classification ------------------------------------------------------------------------------------------------------


@separable
def label_smoothing(p, batch, key):
    logits = features(p, batch["x"]) @ p["head"]
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], V), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean()


@separable
def focal(p, batch, key):
    logits = features(p, batch["x"]) @ p["head"]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]
    return -((1 - jnp.exp(logp)) ** 2 * logp).mean()


@separable
def labels_by_row_number(p, batch, key):
    logp = jax.nn.log_softmax(features(p, batch["x"]) @ p["head"])
    return -logp[jnp.arange(len(logp)), batch["label"]].mean()


@separable
def one_hot_by_scatter(p, batch, key):
    rows = len(batch["label"])
    hot = jnp.zeros((rows, V)).at[jnp.arange(rows), batch["label"]].set(1.0)
    return -(hot * jax.nn.log_softmax(features(p, batch["x"]) @ p["head"])).sum(-1).mean()


@after
def class_weights_by_bincount(p, batch, key):
    counts = jnp.bincount(batch["label"], length=V)
    weight = (1 / jnp.maximum(counts, 1))[batch["label"]]
    return (weight * row_losses(p, batch)).sum() / weight.sum()


@after
def class_weights_by_one_hot(p, batch, key):
    share = jax.nn.one_hot(batch["label"], V).mean(0)
    return (row_losses(p, batch) / (share[batch["label"]] + 0.1)).mean()


@mixed
def class_means_of_losses(p, batch, key):
    """The mean over classes of the mean over a class's rows, by the model's own classes."""
    logits = features(p, batch["x"]) @ p["head"]
    sums = jax.ops.segment_sum(row_losses(p, batch), logits.argmax(-1), V)
    return (sums / (jax.ops.segment_sum(jnp.ones(len(logits)), logits.argmax(-1), V) + 1)).mean()


@separable
def segment_sum_that_is_summed(p, batch, key):
    return jax.ops.segment_sum(row_losses(p, batch), batch["label"], V).sum() / len(batch["label"])


@mixed
def segment_sum_that_is_squared(p, batch, key):
    return (jax.ops.segment_sum(row_losses(p, batch), batch["label"], V) ** 2).sum() / len(batch["label"])


@separable
def distillation(p, batch, key):
    student, teacher = (batch["x"] @ p[name] @ p["head"] / 2.0 for name in "wu")
    return optax.kl_divergence(jax.nn.log_softmax(student), lax.stop_gradient(jax.nn.softmax(teacher))).mean()


@separable
def dice_of_each_row(p, batch, key):
    out = jax.nn.sigmoid(batch["x"] @ p["v"])
    return 1 - (2 * (out * batch["mask"]).sum(1) / (out.sum(1) + batch["mask"].sum(1))).mean()


@mixed
def dice_of_all(p, batch, key):
    out = jax.nn.sigmoid(batch["x"] @ p["v"])
    return 1 - 2 * (out * batch["mask"]).sum() / (out.sum() + batch["mask"].sum())


@separable
def ctc(p, batch, key):
    logits, none = jnp.tanh(batch["x"] @ p["w"]) @ p["head"], jnp.zeros(batch["ids"].shape)
    labels = jnp.clip(batch["ids"][:, :2], 1)
    return optax.ctc_loss(logits, none, labels, none[:, :2]).mean()


@separable
def crf(p, batch, key):
    """A forward recursion over positions, normalised in each row."""

    def step(alpha, logits):
        return jax.nn.logsumexp(alpha[:, :, None] + p["emb"][:, :V] + logits[:, None], axis=1), None

    logits = jnp.swapaxes(batch["x"] @ p["head"], 0, 1)
    alpha, _ = lax.scan(step, logits[0], logits[1:])
    return (jax.nn.logsumexp(alpha, axis=-1) - jnp.take_along_axis(logits[0], batch["label"][:, None], 1)[:, 0]).mean()


# --- mixed rows ----------------------------------------------------------------------------------------------------------


@after
def mixup(p, batch, key):
    order_key, share_key = jax.random.split(key)
    order, share = jax.random.permutation(order_key, len(batch["x"])), jax.random.beta(share_key, 0.4, 0.4)
    logits = features(p, share * batch["x"] + (1 - share) * batch["x"][order]) @ p["head"]
    one, two = (optax.softmax_cross_entropy_with_integer_labels(logits, x) for x in (batch["label"], batch["label"][order]))
    return (share * one + (1 - share) * two).mean()


@after
def mixup_with_the_reversed_batch(p, batch, key):
    x = 0.7 * batch["x"] + 0.3 * batch["x"][::-1]
    return jax.nn.relu(features(p, x) @ p["v"]).mean()


@mixed
def mixup_of_features(p, batch, key):
    h = jnp.tanh(batch["x"] @ p["w"])
    h = 0.7 * h + 0.3 * h[jax.random.permutation(key, len(h))]
    return jnp.tanh(h @ p["v"]).mean()


@case("after")
def cutmix(p, batch, key):
    start = jax.random.randint(key, (), 0, T)
    inside = (jnp.arange(T) >= start)[:, None]
    x = jnp.where(inside, jnp.roll(batch["x"], 1, axis=0), batch["x"])
    losses = [optax.softmax_cross_entropy_with_integer_labels(features(p, x) @ p["head"], label)
              for label in (batch["label"], jnp.roll(batch["label"], 1))]  # fmt: skip
    share = inside.mean()
    return ((1 - share) * losses[0] + share * losses[1]).mean()


@after
def inputs_normalised_over_the_batch(p, batch, key):
    x = (batch["x"] - batch["x"].mean((0, 1))) / (batch["x"].std((0, 1)) + 1e-3)
    return (features(p, x) @ p["v"] - batch["reward"]).__pow__(2).mean()


@after
def advantages_normalised(p, batch, key):
    advantage = (batch["reward"] - batch["reward"].mean()) / (batch["reward"].std() + 1e-6)
    return (advantage * row_losses(p, batch)).mean()


@after
def reward_to_rank(p, batch, key):
    rank = jnp.argsort(jnp.argsort(batch["reward"])) / len(batch["reward"])
    return (rank * row_losses(p, batch)).mean()


@mixed
def advantages_of_a_learned_value(p, batch, key):
    advantage = batch["reward"] - lax.stop_gradient(scores(p, batch))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return (advantage * row_losses(p, batch)).mean()


@after
def whitened_inputs(p, batch, key):
    x = batch["x"].reshape(-1, D)
    cov = x.T @ x / len(x) + 0.1 * jnp.eye(D)
    x = jnp.linalg.solve(cov, x.T).T.reshape(batch["x"].shape)
    return (features(p, x) @ p["v"]).mean()


@after
def clipped_at_a_quantile_of_data(p, batch, key):
    return (jnp.minimum(batch["reward"], jnp.quantile(batch["reward"], 0.9)) * row_losses(p, batch)).mean()


# --- contrastive ---------------------------------------------------------------------------------------------------------


@mixed
def info_nce(p, batch, key):
    a, b = features(p, batch["x"]), features(p, batch["y"])
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(len(a))).mean()


@mixed
def info_nce_by_einsum(p, batch, key):
    a, b = features(p, batch["x"]), features(p, batch["y"])
    return -jnp.diag(jax.nn.log_softmax(jnp.einsum("id,jd->ij", a, b))).mean()


@mixed
def nt_xent_of_concatenated_views(p, batch, key):
    z = jnp.concatenate([features(p, batch["x"]), features(p, batch["y"])])
    similar = jnp.where(jnp.eye(len(z), dtype=bool), -1e9, z @ z.T)
    return -jax.nn.log_softmax(similar)[jnp.arange(len(z)), (jnp.arange(len(z)) + len(z) // 2) % len(z)].mean()


@mixed
def siglip(p, batch, key):
    logits = features(p, batch["x"]) @ features(p, batch["y"]).T
    return -jax.nn.log_sigmoid(logits * (2 * jnp.eye(len(logits)) - 1)).sum() / len(logits)


@mixed
def triplet_of_the_hardest_in_the_batch(p, batch, key):
    z = features(p, batch["x"])
    distance = ((z[:, None] - z[None]) ** 2).sum(-1)
    same = batch["label"][:, None] == batch["label"][None]
    return jax.nn.relu(jnp.where(same, distance, -1e9).max(1) - jnp.where(same, 1e9, distance).min(1) + 1).mean()


@separable
def triplet_within_a_row(p, batch, key):
    a, b, c = (jnp.tanh(batch["x"][:, i] @ p["w"]) for i in range(3))
    return jax.nn.relu(((a - b) ** 2).sum(-1) - ((a - c) ** 2).sum(-1) + 1).mean()


@separable
def momentum_contrast_with_a_queue(p, batch, key):
    queue = jax.random.normal(jax.random.key(3), (7, D))
    query, positive = features(p, batch["x"]), lax.stop_gradient(features(p, batch["y"]))
    logits = jnp.concatenate([(query * positive).sum(-1, keepdims=True), query @ queue.T], 1)
    return -jax.nn.log_softmax(logits)[:, 0].mean()


@separable
def simsiam(p, batch, key):
    a, b = features(p, batch["x"]), lax.stop_gradient(features(p, batch["y"]))
    return -optax.cosine_similarity(a @ p["u"], b, epsilon=1e-6).mean()


@mixed
def barlow_twins(p, batch, key):
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (features(p, batch["x"]), features(p, batch["y"])))
    return ((a.T @ b / len(a) - jnp.eye(D)) ** 2).sum()


@mixed
def prototypes_of_the_batch(p, batch, key):
    z, hot = features(p, batch["x"]), jax.nn.one_hot(batch["label"], V)
    return optax.softmax_cross_entropy_with_integer_labels(z @ (hot.T @ z / len(z)).T, batch["label"]).mean()


@mixed
def maximum_mean_discrepancy(p, batch, key):
    a, b = features(p, batch["x"]), features(p, batch["y"])
    return jnp.exp(-((a[:, None] - b[None]) ** 2).sum(-1)).mean()


@mixed
def difference_of_means(p, batch, key):
    return ((features(p, batch["x"]).mean(0) - batch["y"].mean((0, 1))) ** 2).sum()


@mixed
def ranking_over_the_batch(p, batch, key):
    return -(jax.nn.softmax(batch["reward"]) * jax.nn.log_softmax(scores(p, batch))).sum()


@mixed
def neighbours_in_the_batch(p, batch, key):
    out = scores(p, batch)
    return ((out[1:] - out[:-1]) ** 2).mean()


@mixed
def halves_of_the_batch(p, batch, key):
    one, two = jnp.split(scores(p, batch), 2)
    return -jax.nn.log_sigmoid(one - two).mean()


@case("separable", group=2)
def a_mean_of_the_means_of_halves(p, batch, key):
    """The number of halves does not grow with the rows."""
    return jnp.tanh(scores(p, batch)).reshape(2, -1).mean(1).mean()


# --- normalisation -------------------------------------------------------------------------------------------------------


@mixed
def batch_norm(p, batch, key):
    x = batch["x"] @ p["w"]
    return (jax.nn.relu((x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-3)) @ p["v"]).mean()


@mixed
def batch_norm_by_vmap_with_a_name(p, batch, key):
    def of_row(x):
        h = x @ p["w"]
        mean = lax.pmean(h.mean(0), "batch")
        return (jax.nn.relu(h - mean) @ p["v"]).mean()

    return jax.vmap(of_row, axis_name="batch")(batch["x"]).mean()


@mixed
def mean_only_batch_norm_without_gradient(p, batch, key):
    x = batch["x"] @ p["w"]
    return (jax.nn.relu(x - lax.stop_gradient(x).mean((0, 1))) @ p["v"]).mean()


@separable
def layer_norm(p, batch, key):
    x = batch["x"] @ p["w"]
    return (jax.nn.relu((x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)) @ p["v"]).mean()


@case("separable", group=4)
def ghost_batch_norm(p, batch, key):
    x = (batch["x"] @ p["w"]).reshape(-1, 4, T, D)
    x = (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + 1e-3)
    return (jax.nn.relu(x) @ p["v"]).mean()


# --- pairs and groups ----------------------------------------------------------------------------------------------------


@case("separable", group=2)
def preference_pairs(p, batch, key):
    reward = scores(p, batch).reshape(-1, 2)
    return -jax.nn.log_sigmoid(reward[:, 0] - reward[:, 1]).mean()


@separable
def preference_of_two_leaves(p, batch, key):
    chosen, rejected = (features(p, batch[name]) @ p["v"] for name in "xy")
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


@case("separable", group=2)
def preference_of_even_and_odd_rows(p, batch, key):
    reward = scores(p, batch)
    return -jax.nn.log_sigmoid(reward[0::2] - reward[1::2]).mean()


@case("separable", group=4)
def grpo_groups(p, batch, key):
    reward = batch["reward"].reshape(-1, 4)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    return (advantage.ravel() * row_losses(p, batch)).mean()


@case("separable", group=4)
def groups_in_fortran_order(p, batch, key):
    """The rows of each column are consecutive."""
    columns = jnp.ravel(scores(p, batch)[:, None] * jnp.arange(1.0, 5.0), order="F")
    return columns.reshape(-1, 4).max(1).mean()


@case("separable", group=2)
def groups_by_einops(p, batch, key):
    out = einops.rearrange(scores(p, batch), "(pair side) -> pair side", side=2)
    return (jax.nn.softmax(out, -1)[:, 0] * 2).mean()


# --- late functions of sums ----------------------------------------------------------------------------------------------


@mixed
def rmse(p, batch, key):
    return jnp.sqrt(((scores(p, batch) - batch["reward"]) ** 2).mean())


@mixed
def perplexity(p, batch, key):
    return jnp.exp(token_losses(p, batch).mean())


@mixed
def log_of_the_mean(p, batch, key):
    return jnp.log(row_losses(p, batch).mean())


@mixed
def balanced_experts(p, batch, key):
    gate = jax.nn.softmax(batch["x"] @ p["head"])
    share = jax.nn.one_hot(gate.argmax(-1), V).mean((0, 1))
    return (gate.max(-1) * (batch["x"] @ p["v"])).mean() + 0.1 * (share * gate.mean((0, 1))).sum()


@separable
def z_loss(p, batch, key):
    return token_losses(p, batch).mean() + 1e-2 * (jax.nn.logsumexp(batch["x"] @ p["head"], -1) ** 2).mean()


@mixed
def variance_of_losses(p, batch, key):
    return row_losses(p, batch).var()


@mixed
def largest_loss(p, batch, key):
    return row_losses(p, batch).max()


@mixed
def soft_largest_loss(p, batch, key):
    return jax.nn.logsumexp(row_losses(p, batch))


@mixed
def losses_weighted_by_themselves(p, batch, key):
    losses = row_losses(p, batch)
    return (jax.nn.softmax(lax.stop_gradient(losses)) * losses).sum()


@mixed
def median_of_losses(p, batch, key):
    return jnp.median(row_losses(p, batch))


@separable
def median_of_positions(p, batch, key):
    return jnp.median(token_losses(p, batch), axis=1).mean()


@mixed
def hardest_rows(p, batch, key):
    return lax.top_k(row_losses(p, batch), 2)[0].mean()


@separable
def hardest_positions(p, batch, key):
    return lax.top_k(token_losses(p, batch), 2)[0].mean()


@mixed
def row_of_the_largest_score(p, batch, key):
    return row_losses(p, batch)[scores(p, batch).argmax()]


@mixed
def quantile_of_losses(p, batch, key):
    losses = row_losses(p, batch)
    return jnp.where(losses > jnp.quantile(losses, 0.5), losses, 0).mean()


@cautious
def sorted_and_averaged(p, batch, key):
    return jnp.sort(row_losses(p, batch)).mean()


@cautious
def last_of_a_cumulative_sum(p, batch, key):
    return jnp.cumsum(row_losses(p, batch))[-1] / len(batch["label"])


@mixed
def cumulative_sums(p, batch, key):
    return (jnp.cumsum(row_losses(p, batch)) ** 2).mean()


@mixed
def a_branch_by_the_mean(p, batch, key):
    losses = row_losses(p, batch)
    return lax.cond(losses.mean() > 1.6, lambda x: x.mean(), lambda x: (x**2).mean(), losses)


@after
def a_branch_by_data(p, batch, key):
    losses = row_losses(p, batch)
    return lax.cond(batch["reward"].mean() > 0, lambda x: x.mean(), lambda x: (x**2).mean(), losses)


# --- loops over rows -----------------------------------------------------------------------------------------------------


def one_row(p, x):
    return jnp.tanh(x @ p["w"]).mean(0) @ p["v"]


@separable
def by_vmap(p, batch, key):
    return jax.vmap(lambda x, r: (one_row(p, x) - r) ** 2)(batch["x"], batch["reward"]).mean()


@separable
def by_filter_vmap(p, batch, key):
    return eqx.filter_vmap(one_row, in_axes=(None, 0))(p, batch["x"]).mean()


@separable
def by_vmap_over_positions_first(p, batch, key):
    return jax.vmap(jax.vmap(lambda x: jnp.tanh(x @ p["w"]) @ p["v"]), in_axes=1)(batch["x"]).mean()


@separable
def by_map(p, batch, key):
    return lax.map(partial(one_row, p), batch["x"]).mean()


@case("separable", group=4)
def by_map_of_some_rows_at_a_time(p, batch, key):
    return lax.map(partial(one_row, p), batch["x"], batch_size=4).mean()


@separable
def by_a_scan_that_sums(p, batch, key):
    total, _ = lax.scan(lambda total, x: (total + one_row(p, x), None), 0.0, batch["x"])
    return total / len(batch["x"])


@mixed
def by_a_scan_that_remembers(p, batch, key):
    def step(h, x):
        h = jnp.tanh(h + one_row(p, x))
        return h, h

    return lax.scan(step, 0.0, batch["x"])[1].mean()


@mixed
def by_a_scan_that_counts(p, batch, key):
    def step(carry, x):
        n, total = carry
        return (n + 1, total + n * one_row(p, x)), None

    return lax.scan(step, (0.0, 0.0), batch["x"])[0][1] / len(batch["x"])


@mixed
def by_a_scan_of_two_sums(p, batch, key):
    def step(carry, x):
        inner, total = carry
        return (inner + one_row(p, x), total + inner), None

    return lax.scan(step, (0.0, 0.0), batch["x"])[0][1] / len(batch["x"])


@mixed
def by_a_scan_with_places(p, batch, key):
    return lax.scan(lambda n, x: (n + 1.0, n * one_row(p, x)), 0.0, batch["x"])[1].mean()


@mixed
def by_a_scan_that_splits_its_key(p, batch, key):
    def step(key, x):
        key, own = jax.random.split(key)
        return key, one_row(p, x) * jax.random.normal(own)

    return lax.scan(step, key, batch["x"])[1].mean()


@case("after")
def by_a_scan_that_divides_by_its_count(p, batch, key):
    n, total = lax.scan(lambda c, x: ((c[0] + 1, c[1] + one_row(p, x)), None), (0.0, 0.0), batch["x"])[0]
    return total / n


@case("unknown", is_cautious=True)
def by_a_python_loop(p, batch, key):
    return sum(one_row(p, x) for x in batch["x"]) / len(batch["x"])


@case("unknown", is_cautious=True)
def by_a_stack_of_rows(p, batch, key):
    return jnp.stack([one_row(p, batch["x"][i]) for i in range(len(batch["x"]))]).mean()


@case("unknown", is_cautious=True)
def by_fori_loop(p, batch, key):
    return lax.fori_loop(0, len(batch["x"]), lambda i, total: total + one_row(p, batch["x"][i]), 0.0) / len(batch["x"])


# --- shapes --------------------------------------------------------------------------------------------------------------


@separable
def rows_and_positions_merged(p, batch, key):
    x = batch["x"].reshape(-1, D)
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ p["w"]) @ p["head"], batch["ids"].ravel()).mean()


@separable
def merged_by_einops(p, batch, key):
    x = einops.rearrange(batch["x"], "row (half t) d -> (t row) half d", half=2)
    return (jnp.tanh(x @ p["w"]) @ p["v"]).mean()


@separable
def rows_last(p, batch, key):
    x = batch["x"].T  # [D, T, R]
    return jnp.einsum("dtr,de,e->tr", x, p["w"], p["v"]).__pow__(2).mean()


@separable
def two_views_concatenated(p, batch, key):
    return jnp.tanh(jnp.concatenate([batch["x"], batch["y"]]) @ p["v"]).mean()


@separable
def two_views_stacked(p, batch, key):
    return jnp.tanh(jnp.stack([batch["x"], batch["y"]]) @ p["v"]).mean()


@separable
def rows_repeated(p, batch, key):
    return jnp.tanh(jnp.repeat(batch["x"], 3, axis=0) @ p["v"]).mean()


@separable
def rows_tiled(p, batch, key):
    return jnp.tanh(jnp.tile(batch["x"], (2, 1, 1)) @ p["v"]).mean()


@cautious
def rows_padded_and_cut(p, batch, key):
    x = jnp.pad(batch["x"], ((0, 3), (0, 0), (0, 0)))
    return jnp.tanh(x @ p["v"])[: len(batch["x"])].mean()


@mixed
def without_the_first_row(p, batch, key):
    return row_losses(p, batch)[1:].mean()


@mixed
def the_first_half(p, batch, key):
    return row_losses(p, batch)[: len(batch["label"]) // 2].mean()


@case("after")
def weights_along_the_rows(p, batch, key):
    return (row_losses(p, batch) * jnp.linspace(0, 1, len(batch["label"]))).mean()


@separable
def weights_by_the_number_of_the_row(p, batch, key):
    return (row_losses(p, batch) * (1 + jnp.arange(len(batch["label"])) % 3)).mean()


@mixed
def a_constant_for_each_row(p, batch, key):
    return (row_losses(p, batch) * np.cos(np.arange(len(batch["label"])))).mean()


@mixed
def a_fourier_transform_of_rows(p, batch, key):
    return jnp.abs(jnp.fft.fft(scores(p, batch))).mean()


@separable
def a_fourier_transform_of_positions(p, batch, key):
    return (jnp.abs(jnp.fft.fft(batch["x"] @ p["w"], axis=1)) ** 2).mean()


@separable
def complex_numbers(p, batch, key):
    z = (batch["x"] @ p["w"] + 1j * (batch["x"] @ p["u"])) @ p["v"].astype(jnp.complex64)
    return jnp.real(z * jnp.conj(z)).mean()


@separable
def a_convolution(p, batch, key):
    dims = ("NWC", "WIO", "NWC")
    return jax.nn.gelu(lax.conv_general_dilated(batch["x"], p["kernel"], (1,), "SAME", dimension_numbers=dims)).mean()


@separable
def attention(p, batch, key):
    q, k, v = batch["x"] @ p["w"], batch["x"] @ p["u"], batch["x"]
    weight = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), q @ k.swapaxes(1, 2), -1e9))
    return ((weight @ v) @ p["v"]).mean()


@mixed
def attention_over_rows(p, batch, key):
    x = batch["x"].mean(1)
    return (jax.nn.softmax((x @ p["w"]) @ (x @ p["u"]).T) @ x @ p["v"]).mean()


@separable
def a_scan_over_layers_with_remat(p, batch, key):
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), batch["x"], p["layers"])
    return (x @ p["v"]).mean()


@cautious
def experts_by_ragged_dot(p, batch, key):
    """The rows sorted by their expert, multiplied by it, and put back."""
    order, sizes = jnp.argsort(batch["label"] % 3), jnp.bincount(batch["label"] % 3, length=3)
    out = lax.ragged_dot(batch["x"].mean(1)[order], p["layers"], sizes.astype(jnp.int32))
    return (jnp.tanh(out) @ p["v"]).mean()


@case("unknown", is_cautious=True)
def a_union_of_graphs(p, batch, key):
    """Each row is a graph of T nodes; its edges lead to the nodes in `ids`."""
    rows = len(batch["x"])
    nodes, to = batch["x"].reshape(rows * T, D), (batch["ids"] + T * jnp.arange(rows)[:, None]).ravel()
    received = jax.ops.segment_sum(nodes @ p["w"], to, rows * T)
    return (jnp.tanh(received) @ p["v"]).mean()


@separable
def graphs_and_their_nodes(p, batch, key):
    """The nodes of all graphs in one dim look their graph's value up, and are added to it."""
    rows = len(batch["x"])
    nodes, of = batch["x"].reshape(rows * T, D), jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, T)).ravel()
    values = jnp.tanh(nodes @ p["w"] + row_losses(p, batch)[of][:, None])
    return jnp.tanh(jnp.zeros((rows, D)).at[of].add(values) @ p["v"]).mean()


@separable
def graphs_and_their_nodes_by_position(p, batch, key):
    rows = len(batch["x"])
    nodes, of = batch["x"].swapaxes(0, 1).reshape(T * rows, D), jnp.broadcast_to(jnp.arange(rows), (T, rows)).ravel()
    values = jnp.tanh(nodes @ p["w"] + row_losses(p, batch)[of][:, None])
    return jnp.tanh(jax.ops.segment_sum(values, of, rows) @ p["v"]).mean()


# --- experts -------------------------------------------------------------------------------------------------------------


def by_experts(p, x):
    """Returns the tokens `[..., T, D]` of each sequence, sorted by expert and multiplied with their expert's weights."""
    chosen = jnp.argmax(x @ p["w"][:, :3], -1)
    sizes = jnp.sum(chosen[..., None] == jnp.arange(3), -2)
    tokens = jnp.take_along_axis(x, jnp.argsort(chosen, -1)[..., None], -2)
    numbers = lax.RaggedDotDimensionNumbers((((x.ndim - 1,), (1,)), ((), ())), [x.ndim - 2], [0])
    return lax.ragged_dot_general(tokens, p["layers"], sizes, numbers)


@separable
def experts_of_each_row(p, batch, key):
    return jnp.square(by_experts(p, batch["x"])).mean()


@separable
def experts_of_each_row_in_a_derivative_of_its_own(p, batch, key):
    """The gradient of the experts' weights sums over rows."""

    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda x, dx: (x[0] ** 2, 2 * x[0] * dx[0]))
    return square(by_experts(p, batch["x"])).mean()


@separable
def experts_of_each_row_by_the_primitive(p, batch, key):
    chosen = jnp.sort(jnp.argmax(batch["x"] @ p["w"][:, :3], -1), -1)
    sizes = jnp.sum(chosen[..., None] == jnp.arange(3), -2)
    square = jax.custom_jvp(lambda x: x**2)
    square.defjvp(lambda x, dx: (x[0] ** 2, 2 * x[0] * dx[0]))
    return square(grouped_matmul(batch["x"], p["layers"], sizes, transposed=True)).mean()


@cautious
def experts_of_all_tokens(p, batch, key):
    return jnp.square(by_experts(p, batch["x"].reshape(-1, D))).mean()


@mixed
def experts_with_places_for_the_first_tokens(p, batch, key):
    x = batch["x"].reshape(-1, D)
    return jnp.square(by_experts(p, x)[: len(x) // 2]).mean()


# --- derivatives, solvers, loops -----------------------------------------------------------------------------------------


@separable
def gradient_penalty_by_row(p, batch, key):
    slope = jax.vmap(jax.grad(lambda x: one_row(p, x)))(batch["x"])
    return ((jnp.sqrt((slope**2).sum((1, 2)) + 1e-6) - 1) ** 2).mean()


@separable
def gradient_penalty_of_a_summed_critic(p, batch, key):
    slope = jax.grad(lambda x: jnp.tanh(x @ p["w"]).mean(1).dot(p["v"]).sum())(batch["x"])
    return ((jnp.sqrt((slope**2).sum((1, 2)) + 1e-6) - 1) ** 2).mean()


@after
def wasserstein_gan(p, batch, key):
    """A penalty between real rows and those of the reversed batch."""
    share = jax.random.uniform(key, (len(batch["x"]), 1, 1))
    between = share * batch["x"] + (1 - share) * batch["y"][::-1]
    slope = jax.vmap(jax.grad(partial(one_row, p)))(between)
    real, fake = (jax.vmap(partial(one_row, p))(batch[name]).mean() for name in "xy")
    return fake - real + ((jnp.sqrt((slope**2).sum((1, 2)) + 1e-6) - 1) ** 2).mean()


@separable
def physics_informed(p, batch, key):
    def u(at):
        return jnp.tanh(jnp.tanh(at @ p["w"]) @ p["u"]) @ p["v"]

    points = batch["x"][:, 0]
    laplacian = jax.vmap(lambda at: jnp.trace(jax.hessian(u)(at)))(points)
    boundary = u(jnp.zeros(D)) ** 2  # no rows
    return ((laplacian - jnp.sin(points).sum(-1)) ** 2).mean() + boundary


@separable
def a_flow_with_its_jacobian(p, batch, key):
    def to(x):
        return x + 0.3 * jnp.tanh(x @ p["w"])

    z = jax.vmap(to)(batch["x"][:, 0])
    logdet = jax.vmap(lambda x: jnp.linalg.slogdet(jax.jacfwd(to)(x))[1])(batch["x"][:, 0])
    return (0.5 * (z**2).sum(-1) - logdet).mean()


@separable
def a_solve_with_one_matrix(p, batch, key):
    """The rows are columns of the right-hand side."""
    return (jax.vmap(lambda x: jnp.linalg.solve(p["w"] + 3 * jnp.eye(D), x.mean(0)))(batch["x"]) @ p["v"]).mean()


@mixed
def a_solve_over_rows(p, batch, key):
    x = features(p, batch["x"])
    return (jnp.linalg.solve(x @ x.T + jnp.eye(len(x)), batch["reward"]) * scores(p, batch)).mean()


@separable
def a_loop_of_equinox_that_saves_checkpoints(p, batch, key):
    def of_row(x):
        step = partial(_step_of_a_loop, p["w"])
        return eqx.internal.while_loop(lambda c: c[0] < 4, step, (0, x), max_steps=4, kind="checkpointed")[1] @ p["v"]

    return jax.vmap(of_row)(batch["x"].mean(1)).mean()


@separable
def a_scan_of_equinox_that_saves_checkpoints(p, batch, key):
    def of_row(x):
        def cell(h, x):
            h = jnp.tanh(p["u"] @ h + p["w"] @ x)
            return h, h @ p["v"]

        return eqx.internal.scan(cell, jnp.zeros(D), x, kind="checkpointed", checkpoints=2)[1].sum()

    return jax.vmap(of_row)(batch["x"]).mean()


def _until_small(p, x, kind):
    """A loop of Equinox with as many iterations as a row needs, or 5."""
    step = partial(_step_of_a_loop, 0.3 * p["w"])
    return eqx.internal.while_loop(lambda c: jnp.abs(c[1]).sum() > 0.5, step, (0, x), max_steps=5, kind=kind)


@separable
def a_loop_of_equinox_that_ends_by_row(p, batch, key):
    return (jax.vmap(lambda x: _until_small(p, x, "checkpointed")[1])(batch["x"].mean(1)) @ p["v"]).mean()


@separable
def a_loop_of_equinox_with_a_bound(p, batch, key):
    n, x = jax.vmap(lambda x: _until_small(p, x, "bounded"))(batch["x"].mean(1))
    return (n * (x @ p["v"])).mean()


@mixed
def a_loop_of_equinox_until_all_rows_are_small(p, batch, key):
    return (_until_small({"w": p["w"]}, batch["x"].mean(1).T, "checkpointed")[1].T @ p["v"]).mean()


@separable
def a_stage_that_some_row_needs(p, batch, key):
    """As in the solvers of diffrax: where any row has no slope of the step before, all compute one."""

    def of_row(x, reward):
        slope, is_first = jnp.tanh(p["w"] @ x), reward > 0
        again = lax.cond(eqx.internal.unvmap_any(is_first), lambda x: jnp.tanh(p["w"] @ x), lambda x: slope, x)
        return jnp.where(is_first, again, slope) @ p["v"]

    return jax.vmap(of_row)(batch["x"].mean(1), batch["reward"]).mean()


def _step_of_a_loop(w, carry):
    i, x = carry
    return i + 1, jnp.tanh(w @ x)


@separable
def least_squares_in_each_row(p, batch, key):
    """By reflections that are kept in factors, as lineax does it, or by pivots; and a band of each row."""

    def of_row(x, reward):
        x, y = x.T @ x + jnp.eye(D), p["v"] * reward
        packed, scales = jnp.linalg.qr(x, mode="raw")
        q = lax.linalg.householder_product(packed.mT, scales)
        found = jax.scipy.linalg.solve_triangular(jnp.triu(packed.mT), q.T @ y)
        lu, pivots, order = lax.linalg.lu(lax.stop_gradient(x))
        band = lax.linalg.tridiagonal_solve(y.at[0].set(0), 3 + y**2, y.at[-1].set(0), x @ p["w"])
        ordered = y[lax.linalg.lu_pivots_to_permutation(pivots, D)] + y[order]
        return found @ p["v"] + band.mean() + (ordered * lu[0]).mean()

    fixed = lax.stop_gradient(batch["x"]) * 0.3  # reflections have no derivative
    return jax.vmap(of_row)(fixed, batch["reward"]).mean()


@mixed
def reflections_over_rows(p, batch, key):
    packed, scales = jnp.linalg.qr(lax.stop_gradient(features(p, batch["x"])), mode="raw")
    return (packed.sum() + scales.sum()) * scores(p, batch).mean()


@separable
def a_solve_in_each_row(p, batch, key):
    def of_row(x):
        return jnp.linalg.solve(x.T @ x + jnp.eye(D), p["v"]) @ p["w"] @ p["v"]

    return jax.vmap(of_row)(batch["x"]).mean()


@separable
def a_fixed_point_in_each_row(p, batch, key):
    """A while loop under vmap, whose gradient is that of one more step."""

    def of_row(x):
        def step(z):
            return jnp.tanh(0.3 * z @ p["w"] + x)

        def goes_on(carry):
            z, n = carry
            return (n < 20) & (jnp.abs(step(z) - z).max() > 1e-3)

        z, _ = lax.while_loop(goes_on, lambda carry: (step(carry[0]), carry[1] + 1), (jnp.zeros(D), 0))
        return step(lax.stop_gradient(z)) @ p["v"]

    return jax.vmap(of_row)(batch["x"].mean(1)).mean()


@mixed
def a_fixed_point_until_all_rows_have_it(p, batch, key):
    x = batch["x"].mean(1)

    def step(z):
        return jnp.tanh(0.3 * z @ p["w"] + x)

    z = lax.while_loop(lambda z: jnp.abs(step(z) - z).sum() > 1.0, step, jnp.zeros_like(x))
    return (step(lax.stop_gradient(z)) @ p["v"]).mean()


@case("unknown", is_cautious=True)  # a division by the gradient itself, which only its zero makes linear
def gradients_clipped_in_each_row(p, batch, key):
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (g / (1 + jnp.abs(g).sum(-1, keepdims=True) * 0 + 1.0),))
    return (clip(features(p, batch["x"])) @ p["v"]).mean()


@unknown
def gradients_normalised_over_the_batch(p, batch, key):
    @jax.custom_vjp
    def normalise(x):
        return x

    normalise.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt((g**2).sum()),))
    return (normalise(features(p, batch["x"])) @ p["v"]).mean()


@unknown
def gradients_centred_over_the_batch(p, batch, key):
    @jax.custom_vjp
    def centre(x):
        return x

    centre.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))
    return (centre(features(p, batch["x"])) ** 2).mean()


@separable
def a_custom_jvp(p, batch, key):
    @jax.custom_jvp
    def softplus(x):
        return jnp.logaddexp(x, 0)

    softplus.defjvp(lambda primals, tangents: (softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))
    return softplus(batch["x"] @ p["w"]).mean()


@separable
def straight_through(p, batch, key):
    x = batch["x"] @ p["w"]
    return (x + lax.stop_gradient(jnp.round(x) - x)).__pow__(2).mean()


@after
def a_callback(p, batch, key):
    weight = jax.pure_callback(lambda x: np.asarray(x) - np.asarray(x).mean(), batch["reward"], batch["reward"])
    return (weight * row_losses(p, batch)).mean()


@separable
def checked_for_nan(p, batch, key):
    losses = row_losses(p, batch)
    return eqx.error_if(losses, jnp.isnan(losses).any(), "a loss is NaN").mean()


@separable
def checked_in_each_row(p, batch, key):
    return jax.vmap(lambda loss: eqx.error_if(loss, jnp.isnan(loss), "a loss is NaN"))(row_losses(p, batch)).mean()


# --- reinforcement learning, draws ---------------------------------------------------------------------------------------


@separable
def clipped_policy(p, batch, key):
    ratio = jnp.exp(scores(p, batch) - lax.stop_gradient(scores(p, batch)) + 0.1)
    return -jnp.minimum(ratio * batch["reward"], jnp.clip(ratio, 0.8, 1.2) * batch["reward"]).mean()


@separable
def generalised_advantages(p, batch, key):
    value = batch["x"] @ p["v"]  # [R, T]

    def step(carry, delta):
        carry = delta + 0.9 * carry
        return carry, carry

    delta = lax.stop_gradient(batch["mask"] + 0.9 * jnp.pad(value[:, 1:], ((0, 0), (0, 1))) - value)
    _, advantage = lax.scan(step, jnp.zeros(len(value)), delta.T, reverse=True)
    return (advantage.T * token_losses(p, batch)).mean()


@separable
def dropout(p, batch, key):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (T, D)))(jax.random.split(key, len(batch["x"])))
    return (jnp.tanh(batch["x"] * keep @ p["w"]) @ p["v"]).mean()


@separable
def keys_folded_with_the_row(p, batch, key):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(batch["x"])))
    noise = jax.vmap(lambda key: jax.random.normal(key, (T, D)))(keys)
    return (jnp.tanh((batch["x"] + noise) @ p["w"]) @ p["v"]).mean()


@mixed
def the_first_rows_of_a_table_of_weights(p, batch, key):
    own = p["layers"].reshape(-1)[: len(batch["x"])]
    return (row_losses(p, batch) * own).mean()


@mixed
def weights_repeated_for_a_fourth_of_the_rows_each(p, batch, key):
    own = jnp.repeat(p["v"][:4], len(batch["x"]) // 4)
    return (row_losses(p, batch) * own).mean()


@mixed
def mixup_with_a_beta_by_row(p, batch, key):
    """One key for all: JAX draws gammas for all rows at once."""
    share = jax.random.beta(key, 0.2, 0.2, (len(batch["x"]), 1, 1))
    return (jnp.tanh((share * batch["x"] + (1 - share) * batch["x"][::-1]) @ p["w"]) @ p["v"]).mean()


@mixed
def a_sum_of_rows_with_gammas(p, batch, key):
    return (row_losses(p, batch) * jax.random.gamma(key, 2.0, (len(batch["x"]),))).sum()


@separable
def a_generator(p, batch, key):
    fake = jnp.tanh(jax.random.normal(key, (len(batch["x"]), T, D)) @ p["u"])
    return (batch["x"] @ p["v"]).mean() - (fake @ p["v"]).mean()


@separable
def a_discriminator(p, batch, key):
    """Noise by row, from which as many examples are made as the batch has, each with a draw of its own."""
    noise_key, key = jax.random.split(key)
    fake = jnp.tanh(jax.random.normal(noise_key, (len(batch["x"]), D)) @ p["u"])
    fake = jax.vmap(lambda x, key: x * jax.random.bernoulli(key, 0.7, x.shape))(fake, jax.random.split(key, len(fake)))
    is_real = optax.sigmoid_binary_cross_entropy(scores(p, batch), jnp.ones(len(batch["x"])))
    is_fake = optax.sigmoid_binary_cross_entropy(fake @ p["v"], jnp.zeros(len(fake)))
    return 0.5 * (is_real.mean() + is_fake.mean())


@mixed
def a_generator_whose_examples_are_compared(p, batch, key):
    fake = jnp.tanh(jax.random.normal(key, (len(batch["x"]), D)) @ p["u"])
    return jnp.exp(-((features(p, batch["x"])[:, None] - fake) ** 2).sum(-1)).mean()


@after
def a_bootstrap_of_rows(p, batch, key):
    """Rows drawn with replacement."""
    chosen = jax.random.randint(key, (len(batch["x"]),), 0, len(batch["x"]))
    return (features(p, batch["x"][chosen]) @ p["v"]).mean()
