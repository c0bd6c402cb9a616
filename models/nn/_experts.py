"""`MixtureOfExperts`: a router that sends each token to a few of many MLPs.

This module owns the routing. What it reports, for the loss and its metrics, is in `_routing`; the product with the weights
of experts is in `_grouped`. How experts are split over devices is the plan's.

Sources: Shazeer et al. 2017 (arXiv:1701.06538); Fedus et al. 2021, *Switch Transformers* (arXiv:2101.03961); Zoph et al.
2022, *ST-MoE* (arXiv:2202.08906), for the z-loss; *Mixtral of Experts* (arXiv:2401.04088); *Qwen3* (arXiv:2505.09388);
*DeepSeek-V3* (arXiv:2412.19437), for sigmoid routing and its correction; *GRIN* (arXiv:2409.12136), for sparse mixers.

Dims: seq = tokens of one sequence, d = width, experts, chosen = the experts of a token; dims = any leading dims.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx._rounding import at_least_float32
from redeqx.errors import wrong

from ._grouped import grouped_linear
from ._layers import linear, normal_linear
from ._routing import Routing


class Expert(eqx.Module):
    """An MLP: two layers, or three of which one gates another (SwiGLU, arXiv:2002.05202). Also a stack of them, whose
    weights are `[experts, out, in]`."""

    gate: eqx.nn.Linear | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)
    limit: float | None = eqx.field(static=True)

    def __init__(
        self,
        d: int,
        d_hidden: int,
        *,
        is_gated: bool,
        use_bias: bool = False,
        activation: Callable[..., Any],
        limit: float | None = None,
        std: float,
        key: PRNGKeyArray,
    ):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = normal_linear(d, d_hidden, std=std, use_bias=use_bias, key=gate_key) if is_gated else None
        self.up = normal_linear(d, d_hidden, std=std, use_bias=use_bias, key=up_key)
        self.down = normal_linear(d_hidden, d, std=std, use_bias=use_bias, key=down_key)
        self.activation, self.limit = activation, limit

    def __call__(
        self,
        x: Float[Array, "*dims d"],
        product: Callable[[eqx.nn.Linear, Array, Array | None], Array] = lambda layer, x, factors: linear(layer, x),
        factors: Float[Array, "*dims 1"] | None = None,
    ) -> Float[Array, "*dims d"]:
        """Applies the layers by `product`, and multiplies each token's output with its factor.

        The factor is applied to the inner layer, and to the bias of the last one: it is the same, and the outputs need not
        be kept for the backward pass.
        """
        hidden = product(self.up, x, None)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            gate = product(self.gate, x, None)
            if self.limit is not None:
                gate, hidden = jnp.minimum(gate, self.limit), jnp.clip(hidden, -self.limit, self.limit) + 1
            hidden = self.activation(gate) * hidden
        if factors is not None:
            hidden *= factors.astype(hidden.dtype)
        return product(self.down, hidden, factors)


class MixtureOfExperts(eqx.Module):
    """A sparse layer in place of an MLP: each token is sent to `n_chosen` of `n_experts` MLPs, whose outputs are summed with
    the router's weights.

    ```python
    y, routing = layer(x)  # x: [..., seq, d], or [d] for one token
    ```

    No token is dropped unless `capacity_factor` is given, and the work is that of the chosen experts: tokens are sorted by
    expert, and each expert's weights are multiplied with its own tokens. Each sequence is sorted, balanced and limited by
    itself. So a sequence's output depends on no other, and `layer(x)` of a batch equals `jax.vmap(layer)(x)`.

    **Arguments:**

    - `d_model`, `d_expert`: the width of the model, and the inner width of an expert.
    - `n_experts`, `n_chosen`: the number of experts, and of those that a token is sent to.
    - `is_gated`, `activation`: whether experts have a gate (SwiGLU), and the function of their inner layer.
    - `use_bias`: whether the router and the experts, but not the shared one, have biases.
    - `limit`: the gate is at most this, and what it gates is clipped to `[-limit, limit]` and increased by 1, as in gpt-oss;
        None for no limit.
    - `score`: `"softmax"` over all experts; `"sigmoid"` of each, as DeepSeek-V3; or `"sparsemixer"`, as PhiMoE: the weight
        of an expert is a softmax over itself and the experts whose logits are smaller, but close.
    - `jitter`: in a sparse mixer, logits are close if they differ by at most `2 * jitter` of their size.
    - `n_groups`, `n_chosen_groups`: the experts of a token are in so many of these groups of consecutive experts: those with
        the largest score (DeepSeek-V2), or for `"sigmoid"` the largest sum of two scores (DeepSeek-V3). 1 for no limit.
    - `renormalize`: whether the weights of the chosen experts are divided by their sum, plus `eps` for `"sigmoid"`.
    - `scale`: multiplies the weights, as DeepSeek-V3's `routed_scaling_factor`.
    - `has_factors`: whether the weight of each expert is multiplied with a number of its own, as in Gemma 4.
    - `has_correction`: whether a number for each expert is added to its score when experts are chosen, but not to its weight
        (DeepSeek-V3). Its gradient is the number of choices above the mean, so an optimizer that uses the sign alone, or
        Adam, balances the experts without a balance loss. `add_routing` adds it.
    - `by_logits`: whether experts are chosen by logits, to which the correction is added, instead of scores, as in Kolibri.
    - `wide`: the fields that 16-bit models keep in float32, `"router"` and `"correction"` in DeepSeek. A router that is not
        among them rounds its logits as all layers do, as in Mixtral.
    - `d_shared`: the inner width of an expert that every token is sent to besides; 0 for none.
    - `gates_shared`: whether its output is multiplied with a number for each token, as in Qwen2-MoE.
    - `averages_shared`: whether the output is the mean of its output and of the others', as in Command A+.
    - `capacity_factor`: an expert takes up to so many times the mean number of a sequence's choices, first tokens first. The
        others are dropped, and counted. None drops nothing.
    - `init_std`: standard deviation of the initial weights.
    - `key`: draws the initial weights.

    Raises ValueError for sizes below 1, for more chosen experts than there are, for an unknown score, and for a
    `capacity_factor` that is not above 0.
    """

    router: eqx.nn.Linear
    experts: Expert
    shared: Expert | None
    shared_gate: eqx.nn.Linear | None
    correction: Float[Array, "*layers experts"] | None
    factors: Float[Array, "*layers experts"] | None
    n_chosen: int = eqx.field(static=True)
    score: str = eqx.field(static=True)
    jitter: float = eqx.field(static=True)
    renormalize: bool = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    wide: tuple[str, ...] = eqx.field(static=True)
    averages_shared: bool = eqx.field(static=True)
    by_logits: bool = eqx.field(static=True)
    n_groups: int = eqx.field(static=True)
    n_chosen_groups: int = eqx.field(static=True)
    capacity_factor: float | None = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        n_experts: int,
        n_chosen: int,
        *,
        is_gated: bool = True,
        activation: Callable[[Array], Array] = jax.nn.silu,
        use_bias: bool = False,
        limit: float | None = None,
        score: str = "softmax",
        jitter: float = 0.01,
        renormalize: bool = True,
        eps: float = 1e-20,
        scale: float = 1.0,
        has_factors: bool = False,
        has_correction: bool = False,
        wide: tuple[str, ...] = (),
        n_groups: int = 1,
        n_chosen_groups: int = 1,
        d_shared: int = 0,
        gates_shared: bool = False,
        averages_shared: bool = False,
        by_logits: bool = False,
        capacity_factor: float | None = None,
        init_std: float = 0.02,
        key: PRNGKeyArray,
    ):
        sizes = {"d_model": d_model, "d_expert": d_expert, "n_experts": n_experts, "n_chosen": n_chosen}
        for name, size in sizes.items():
            if size < 1:
                raise wrong(name, "at least 1", size, "Pass a positive size.")
        if n_chosen > n_experts:
            raise wrong("n_chosen", f"at most `n_experts`={n_experts}", n_chosen, "Choose fewer.")
        if n_groups < 1 or n_experts % n_groups:
            raise wrong("n_groups", f"a divisor of `n_experts`={n_experts}", n_groups, "Make them equal.")
        if not n_chosen <= n_chosen_groups * (n_experts // n_groups) <= n_experts:
            rule = f"at most `n_groups`={n_groups}, with `n_chosen`={n_chosen} experts of {n_experts}"
            raise wrong("n_chosen_groups", rule, n_chosen_groups, "Choose another number of groups.")
        if d_shared < 0:
            raise wrong("d_shared", "at least 0", d_shared, "Pass 0 for no shared expert.")
        if score not in ("softmax", "sigmoid", "sparsemixer"):
            known = "'softmax', 'sigmoid' or 'sparsemixer'"
            raise wrong("score", known, repr(score), "Mixtral and Qwen3 have 'softmax'.")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise wrong("capacity_factor", "a finite number above 0", capacity_factor, "Pass None to drop nothing.")
        router_key, experts_key, shared_key = jax.random.split(key, 3)

        def make(key: PRNGKeyArray, d_hidden: int = d_expert, **options: Any) -> Expert:
            return Expert(d_model, d_hidden, is_gated=is_gated, activation=activation, std=init_std, **options, key=key)

        def make_chosen(key: PRNGKeyArray) -> Expert:
            return make(key, use_bias=use_bias, limit=limit)

        self.router = normal_linear(d_model, n_experts, std=init_std, use_bias=use_bias, key=router_key)
        self.experts = eqx.filter_vmap(make_chosen)(jax.random.split(experts_key, n_experts))
        self.shared = make(shared_key, d_shared) if d_shared else None
        gate_key = jax.random.fold_in(shared_key, 1)
        gates_shared = gates_shared and self.shared is not None
        self.shared_gate = normal_linear(d_model, 1, std=init_std, use_bias=False, key=gate_key) if gates_shared else None
        self.correction = jnp.zeros(n_experts) if has_correction else None
        self.factors = jnp.ones(n_experts) if has_factors else None
        self.n_chosen, self.score, self.jitter, self.renormalize, self.eps = n_chosen, score, jitter, renormalize, eps
        self.scale, self.wide, self.capacity_factor = scale, wide, capacity_factor
        self.n_groups, self.n_chosen_groups = n_groups, n_chosen_groups
        self.averages_shared, self.by_logits = averages_shared, by_logits

    def __call__(
        self,
        x: Float[Array, "*dims d"],
        *,
        mask: Bool[Array, "..."] | None = None,
        routed_by: Float[Array, "*dims d"] | None = None,
    ) -> tuple[Float[Array, "*dims d"], Routing]:
        """Returns the outputs, and what the router did.

        **Arguments:**

        - `x`: tokens, `[..., seq, d]`; or one token, `[d]`.
        - `mask`: `[..., seq]`, False for tokens that do not count, such as padding: they are sent to the shared expert
            alone, and the routing does not count them. None for all.
        - `routed_by`: the input of the router, of the shape of `x`; None for `x` itself.

        Raises ValueError for a mask of another shape.
        """
        if mask is not None and mask.shape != x.shape[:-1]:
            rule = f"the shape of `x` without its last dim, {x.shape[:-1]}"
            raise wrong("mask", rule, mask.shape, "Pass one boolean a token.")
        if x.ndim == 1:
            mask, routed_by = (None if array is None else array[None] for array in (mask, routed_by))
            y, routing = self(x[None], mask=mask, routed_by=routed_by)
            return y[0], routing
        with jax.named_scope("router"):
            logits, scores = self._scores(x if routed_by is None else routed_by)
            chosen, weights = self._choose(logits, scores)
            wanted = chosen if mask is None else jnp.where(mask[..., None], chosen, self._n_experts)
            placed = self._limit(wanted)
        with jax.named_scope("experts"):
            y = self._mix(x, placed, weights)
        if self.shared is not None:
            with jax.named_scope("shared_expert"):
                shared = self.shared(x)
                y += shared if self.shared_gate is None else jax.nn.sigmoid(linear(self.shared_gate, x)) * shared
                y = y / 2 if self.averages_shared else y
        return y, self._routing(logits, scores, wanted, placed, mask)

    def keeps_float32(self, dtype: Any) -> tuple[str, ...]:
        """Returns the fields that are not cast to this dtype (see `redeqx._tree`)."""
        del dtype
        return self.wide

    @property
    def _n_experts(self) -> int:
        """The number of experts, and the index that stands for none of them."""
        return self.router.out_features  # pyright: ignore[reportReturnType]

    def _scores(
        self, x: Float[Array, "*dims seq d"]
    ) -> tuple[Float[Array, "*dims seq experts"], Float[Array, "*dims seq experts"]]:
        """Returns the router's logits and scores, at least float32."""
        if "router" in self.wide:  # rounded ones choose other experts, and so do those of TF32
            with jax.default_matmul_precision("highest"):
                logits = linear(self.router, x.astype(at_least_float32(x.dtype)))
        else:
            logits = linear(self.router, x)
        logits = logits.astype(at_least_float32(logits.dtype))
        return logits, jax.nn.sigmoid(logits) if self.score == "sigmoid" else jax.nn.softmax(logits)

    def _choose(
        self, logits: Float[Array, "*dims seq experts"], scores: Float[Array, "*dims seq experts"]
    ) -> tuple[Int[Array, "*dims seq chosen"], Float[Array, "*dims seq chosen"]]:
        """Returns the indices of the chosen experts, and the weights of their outputs."""
        corrected = logits if self.by_logits else scores
        corrected = corrected if self.correction is None else corrected + self.correction.astype(scores.dtype)
        chosen = _largest(self._limit_groups(jax.lax.stop_gradient(corrected)), self.n_chosen)
        if self.score == "sparsemixer":
            weights = _mixed(logits, chosen, self.jitter)
        else:
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.renormalize:
            weights /= weights.sum(-1, keepdims=True) + (self.eps if self.score == "sigmoid" else 0.0)
        if self.factors is not None:
            factors = jnp.broadcast_to(self.factors.astype(scores.dtype), scores.shape)
            weights *= jnp.take_along_axis(factors, chosen, axis=-1)
        return chosen, self.scale * weights

    def _limit_groups(self, scores: Float[Array, "*dims seq experts"]) -> Float[Array, "*dims seq experts"]:
        """Returns the scores, with those of experts outside the chosen groups replaced by -inf."""
        if self.n_chosen_groups == self.n_groups:
            return scores
        groups = rearrange(scores, "... (groups n) -> ... groups n", groups=self.n_groups)
        best = groups.max(-1)
        if self.score == "sigmoid" and groups.shape[-1] > 1:
            best += jnp.take_along_axis(groups, _largest(groups, 2)[..., 1:], axis=-1)[..., 0]
        chosen = _largest(best, self.n_chosen_groups)
        is_chosen = jnp.any(chosen[..., None] == jnp.arange(self.n_groups), axis=-2)
        return jnp.where(jnp.repeat(is_chosen, groups.shape[-1], axis=-1), scores, -jnp.inf)

    def _count(self, placed: Int[Array, "*dims seq chosen"]) -> Int[Array, "*dims experts"]:
        """Counts the choices of each sequence that fell on each expert. XLA fuses the comparison with the sum."""
        return jnp.sum(placed[..., None] == jnp.arange(self._n_experts), axis=(-3, -2), dtype=jnp.int32)

    def _limit(self, wanted: Int[Array, "*dims seq chosen"]) -> Int[Array, "*dims seq chosen"]:
        """Replaces choices that exceed the capacity by the index of no expert."""
        if self.capacity_factor is None:
            return wanted
        flat = rearrange(wanted, "... seq chosen -> ... (seq chosen)")
        sizes = self._count(wanted)
        mean = sizes.sum(-1, keepdims=True) / self._n_experts
        order = jnp.argsort(flat, axis=-1, stable=True)
        # Each choice's place in its group: its place in the order, minus the group's start.
        starts = jnp.concatenate([jnp.zeros_like(sizes[..., :1]), jnp.cumsum(sizes, -1)], -1)
        place = jnp.argsort(order, axis=-1) - jnp.take_along_axis(starts, flat, axis=-1)
        kept = place < jnp.ceil(self.capacity_factor * mean)
        return jnp.where(kept, flat, self._n_experts).reshape(wanted.shape)

    def _mix(
        self,
        x: Float[Array, "*dims seq d"],
        placed: Int[Array, "*dims seq chosen"],
        weights: Float[Array, "*dims seq chosen"],
    ) -> Float[Array, "*dims seq d"]:
        """Returns the weighted sums of the outputs of each token's experts."""
        flat = rearrange(placed, "... seq chosen -> ... (seq chosen)")
        order = jnp.argsort(flat, axis=-1, stable=True)  # choices of no expert come last, after all groups
        sizes = self._count(placed)
        rows = _permute(repeat(x, "... seq d -> ... (seq chosen) d", chosen=self.n_chosen), order)
        factors = _permute(rearrange(weights, "... seq chosen -> ... (seq chosen) 1"), order)
        out = self.experts(rows, lambda layer, x, factors: grouped_linear(layer, x, sizes, factors), factors)
        out = _permute(out, jnp.argsort(order, axis=-1))
        return rearrange(out, "... (seq chosen) d -> ... seq chosen d", chosen=self.n_chosen).sum(-2)

    def _routing(
        self,
        logits: Float[Array, "*dims seq experts"],
        scores: Float[Array, "*dims seq experts"],
        wanted: Int[Array, "*dims seq chosen"],
        placed: Int[Array, "*dims seq chosen"],
        mask: Bool[Array, "*dims seq"] | None,
    ) -> Routing:
        *dims, seq, n = logits.shape
        dtype = logits.dtype
        tokens = jnp.full(dims, seq, dtype) if mask is None else mask.sum(-1, dtype=dtype)
        shares = scores / (scores.sum(-1, keepdims=True) + 1e-20) if self.score == "sigmoid" else scores
        squares = jax.nn.logsumexp(logits, axis=-1) ** 2
        if mask is not None:
            shares, squares = jnp.where(mask[..., None], shares, 0), jnp.where(mask, squares, 0)
        asked, given = self._count(wanted).astype(dtype), self._count(placed).astype(dtype)
        at_least_1 = jnp.maximum(tokens, 1)
        mean = at_least_1 * self.n_chosen / n
        correction = jnp.zeros(dims, dtype)
        if self.correction is not None:
            excess = jnp.einsum("...e,e->...", asked - asked.mean(-1, keepdims=True), self.correction.astype(dtype))
            correction = excess - jax.lax.stop_gradient(excess)
        return Routing(
            tokens=tokens,
            balance=n * (asked * shares.sum(-2)).sum(-1) / at_least_1,
            z=squares.sum(-1),
            dropped=(asked - given).sum(-1) / self.n_chosen,
            imbalance=tokens * asked.max(-1) / mean,
            correction=correction,
        )


def _largest(scores: Float[Array, "*dims experts"], n: int) -> Int[Array, "*dims chosen"]:
    """Returns the indices of the `n` largest scores, the largest first, and of equal ones the first.

    `jax.lax.top_k` would be the same, but XLA (jax 0.10.2) gathers the scores of all devices for it.
    """
    found: list[Array] = []
    for _ in range(n):
        found.append(jnp.argmax(scores, axis=-1))
        scores = jnp.where(jnp.arange(scores.shape[-1]) == found[-1][..., None], -jnp.inf, scores)
    return jnp.stack(found, axis=-1)


def _mixed(
    logits: Float[Array, "*dims experts"], chosen: Int[Array, "*dims chosen"], jitter: float
) -> Float[Array, "*dims chosen"]:
    """Returns the weights of chosen experts, the largest first: of each, that of a softmax over itself and the experts that
    are left and close."""
    weights, left = [], logits
    for i in range(chosen.shape[-1]):
        expert = chosen[..., i : i + 1]
        largest = jnp.take_along_axis(logits, expert, axis=-1)
        is_far = (largest - logits) / jnp.maximum(jnp.abs(logits), largest) > 2 * jitter
        shares = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left))
        weights.append(jnp.take_along_axis(shares, expert, axis=-1))
        left = jnp.where(jnp.arange(logits.shape[-1]) == expert, -jnp.inf, left)
    return jnp.concatenate(weights, axis=-1)


def _permute(x: Float[Array, "*dims rows d"], order: Int[Array, "*dims rows"]) -> Float[Array, "*dims rows d"]:
    """Returns the rows of each sequence in another order. As no index repeats, the gradient needs no atomic additions."""

    def permute(x: Array, order: Array) -> Array:
        return x.at[order].get(mode="promise_in_bounds", unique_indices=True)

    for _ in range(x.ndim - 2):
        permute = jax.vmap(permute)
    return permute(x, order)
