"""Convolutions, which XLA's partitioners compute wrongly in four ways, all silent. This rule avoids them.

A convolution along a dim that is split over devices is wrong if it is replicated over another axis of the mesh, or if that
axis splits its input channels: its gradients are too large, and its values may be wrong too. So where a sequence axis splits
positions, the part of each device with its edges, a window, becomes a row of its own: XLA then finds more rows, and no dim
along which a kernel slides is split. Where the positions of the result do not divide, and of images, none is split at all.
Nor are rows, if it is a convolution along these and a model axis repeats it.

A grouped convolution whose window does not slide (a kernel of size 1, or of the size of the input) is partitioned as a
product, and its groups are forgotten. If its channels are split over devices, its values are wrong, or it does not compile.
A convolution with a kernel for each row, as in StyleGAN, has the rows among its channels, so this happens on any mesh. It is
computed as the product that it is.

If the dims of a grouped convolution's output are in another order than its input's, as in the gradient of a kernel for each
row, it takes one dim for another. It is computed in the input's order.

If the rows of a grouped convolution are split over some axes of a mesh and it is replicated over another axis of n devices,
the gradient of its weight is n times too large. It is right if that axis splits something. So this rule splits the channels
over the model axis. Over the sequence axis, where it does not split the result's positions, it splits the rows; and if these
do not divide, the channels. Groups of zeros are added first if the channels do not divide: XLA would gather all rows, and
convolve them on each device (as in openxla/xla#47945). With 9 channels over data=2 x fsdp=2 x model=2 an H100 then sends 84
times the bytes, and computes 7 times as much (compiled by jax 0.10.2; 2026-11-30).

Source: measured with jax 0.10.2 (the tests `test_xla_still_...` fail once it is fixed). Cost: a copy of split positions with
their edges, which are sent, and with zeros between those that are dilated; resharding the input's channels over these axes,
which is a slice if they are replicated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh

from ..machine import BATCH_AXES, MODEL, SEQUENCE, n_batch_shards, n_shards
from ..tracing import Site, plain, run
from ._by_positions import ByPositions
from ._constrain import split_over
from ._pads import pad

_COUNTS = ("feature_group_count", "batch_group_count")  # the second is the first's weight gradient, as in a user's `grad_fn`


@dataclass(frozen=True)
class FixConvolutions(ByPositions):
    """Computes convolutions along split positions, grouped convolutions, and their gradients, correctly on a mesh. Of a
    function that is not differentiated only the values must be right."""

    mesh: Mesh
    is_differentiated: bool = True
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        if eqn.primitive.name != "conv_general_dilated" or self.mesh.size == 1:
            return False
        is_repeated = self.is_differentiated and self.mesh.shape[MODEL] > 1
        is_grouped = _groups(eqn)[0] > 1 and (is_repeated or _is_turned(eqn) or _window(eqn) is not None)
        return is_grouped or self._keeps_windows_whole

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        x, weight = map(plain, ins)
        if _groups(eqn)[0] > 1 and (window := _window(eqn)) is not None:
            return [_product(eqn, x, weight, window)]
        i, n = self._split(eqn), self.mesh.shape[SEQUENCE]
        if i is None:
            return [self._convolved(eqn, x, weight, self._axes(eqn))]
        return [_joined(eqn, self._convolved(*_in_windows(eqn, x, i, n), weight, self._axes(eqn)), i, n)]

    def _convolved(self, eqn: Any, x: jax.Array, weight: jax.Array, axes: Mapping[int, Any]) -> jax.Array:
        """Returns a convolution whose input is split over these mesh axes, with groups of zeros if groups do not divide."""
        numbers, (n_groups, count), n_added = eqn.params["dimension_numbers"], _groups(eqn), 0
        if n_groups > 1:
            channels = numbers.lhs_spec[int(count == "feature_group_count")]
            n = n_shards(axes[channels], self.mesh)
            n_added = -n_groups % n if x.shape[channels] % n else 0
            x, weight = (
                _with_groups(x, channels, n_groups, n_added),
                _with_groups(weight, numbers.rhs_spec[0], n_groups, n_added),
            )
            eqn = eqn.replace(params={**eqn.params, count: n_groups + n_added})
        if along := self._keeps_windows_whole:  # no dim along which the window slides is split, of gradients neither
            weight = split_over(weight, self.mesh, dict.fromkeys(numbers.rhs_spec[2:]))
        out = _in_order(eqn, split_over(x, self.mesh, axes), weight)
        if along:
            out = split_over(out, self.mesh, dict.fromkeys(numbers.out_spec[2:]))
        dim = numbers.out_spec[1]
        return jax.lax.slice_in_dim(out, 0, out.shape[dim] // (n_groups + n_added) * n_groups, axis=dim) if n_added else out

    @property
    def _keeps_windows_whole(self) -> bool:
        """Whether a window may slide along a dim that is split, positions or, in a series of rows, the rows, while another
        axis repeats the convolution."""
        is_repeated = self.is_differentiated and self.mesh.shape[MODEL] > 1
        return self.mesh.shape[SEQUENCE] > 1 or (is_repeated and n_batch_shards(self.mesh) > 1)

    def _split(self, eqn: Any) -> int | None:
        """Returns along which dim, counted from the first that the window slides along, the result's positions are split."""
        if (n := self.mesh.shape[SEQUENCE]) == 1:
            return None
        numbers, dims = eqn.params["dimension_numbers"], self.positions.dims
        of_x, of_weight, of_out = (
            [dim for dim in spec[2:] if dim in dims.get(atom, ())]
            for spec, atom in zip(numbers, (*eqn.invars, *eqn.outvars), strict=True)
        )
        is_plain = len(of_x) == len(of_out) == 1 and not of_weight and eqn.params["batch_group_count"] == 1
        size = eqn.outvars[0].aval.shape[of_out[0]] if is_plain else 0
        return numbers.lhs_spec[2:].index(of_x[0]) if size > 0 and size % n == 0 else None

    def _axes(self, eqn: Any) -> Mapping[int, Any]:
        """Returns the mesh axes of the dims of an input to split, such that no axis is left over for groups."""
        x, numbers, (n_groups, count) = eqn.invars[0], eqn.params["dimension_numbers"], _groups(eqn)
        positions, n_rows, n = self.positions, n_batch_shards(self.mesh), self.mesh.shape[SEQUENCE]
        batch, channels = numbers.lhs_spec[0], numbers.lhs_spec[int(count == "feature_group_count")]
        axes: dict[int, Any] = dict.fromkeys(numbers.lhs_spec[2:]) if self._keeps_windows_whole else {}
        among_channels = x.aval.shape[batch] == 1 or _is_turned(eqn)  # the rows may be there
        others = (*BATCH_AXES, MODEL) if among_channels else (MODEL,)
        if self._split(eqn) is not None:
            by_rows = positions.rows_in(x, n_rows) == batch
            axes[batch] = (SEQUENCE, *BATCH_AXES) if by_rows else (SEQUENCE,)
            others = (MODEL,) if by_rows else (*BATCH_AXES, MODEL)
        elif n > 1 and positions.rows_in(x, n_rows * n) == batch:
            axes[batch], others = (*BATCH_AXES, SEQUENCE), (MODEL,)
        elif n > 1:
            others = (SEQUENCE, *others)
        return {**axes, channels: others} if n_groups > 1 else axes


def _groups(eqn: Any) -> tuple[int, str]:
    """Returns the number of groups of a convolution, and the parameter that has it."""
    return max((eqn.params[count], count) for count in _COUNTS)


def _is_turned(eqn: Any) -> bool:
    """Whether the dims of a grouped convolution's output are in another order than those of its input."""
    numbers = eqn.params["dimension_numbers"]
    return eqn.params["feature_group_count"] > 1 and numbers.lhs_spec != numbers.out_spec


def _in_order(eqn: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns a convolution; a grouped one is computed in the order of the input's dims."""
    numbers = eqn.params["dimension_numbers"]
    if not _is_turned(eqn):
        (out,) = run(eqn, [x, weight])
        return out
    changed = {"dimension_numbers": numbers._replace(out_spec=numbers.lhs_spec)}
    (out,) = run(eqn.replace(params={**eqn.params, **changed}), [x, weight])
    return jnp.transpose(out, [numbers.lhs_spec[numbers.out_spec.index(dim)] for dim in range(out.ndim)])


# --- windows ------------------------------------------------------------------------------------------------------------


def _in_windows(eqn: Any, x: jax.Array, i: int, n: int) -> tuple[Any, jax.Array]:
    """Returns the convolution of n windows of an input, which follow each other along its i-th dim after rows and channels.
    They are the first factor of the rows."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    batch, dim = numbers.lhs_spec[0], numbers.lhs_spec[2 + i]
    n_results, size = eqn.outvars[0].aval.shape[numbers.out_spec[2 + i]], eqn.invars[1].aval.shape[numbers.rhs_spec[2 + i]]
    n_own = n_results // n * params["window_strides"][i]  # entries of a part that the next one does not read
    n_edge = max((size - 1) * params["rhs_dilation"][i] + 1 - params["window_strides"][i], 0)
    low, dilation = params["padding"][i][0], params["lhs_dilation"][i]
    high = n * n_own + n_edge - low - ((x.shape[dim] - 1) * dilation + 1)
    x = pad(x, jnp.zeros((), x.dtype), [(low, high, dilation - 1) if j == dim else (0, 0, 0) for j in range(x.ndim)])
    n_next = -(-n_edge // n_own)  # the parts after one of which it reads some
    own = jax.lax.slice_in_dim(x, 0, n * n_own, axis=dim)
    last = jax.lax.slice_in_dim(x, n * n_own, None, axis=dim)
    last = jnp.pad(last, [(0, n_next * n_own - n_edge if j == dim else 0) for j in range(x.ndim)])
    own, last = (
        each.reshape(*x.shape[:dim], count, n_own, *x.shape[dim + 1 :]) for each, count in ((own, n), (last, n_next))
    )
    parts = [own]
    for k in range(1, n_next + 1):
        width = min(n_own, n_edge - (k - 1) * n_own)
        edges = [jax.lax.slice_in_dim(each, 0, width, axis=dim + 1) for each in (own, last)]
        parts.append(jax.lax.slice_in_dim(jnp.concatenate(edges, dim), k, k + n, axis=dim))
    x = jnp.concatenate(parts, dim + 1)
    x = jnp.moveaxis(x, dim, batch)
    x = x.reshape(*x.shape[:batch], n * x.shape[batch + 1], *x.shape[batch + 2 :])
    none = {"padding": (0, 0), "lhs_dilation": 1}
    changed = {name: tuple(no if j == i else each for j, each in enumerate(params[name])) for name, no in none.items()}
    return eqn.replace(params={**params, **changed}), x


def _joined(eqn: Any, out: jax.Array, i: int, n: int) -> jax.Array:
    """Returns the output of a convolution of windows as that of the convolution."""
    batch, dim = (eqn.params["dimension_numbers"].out_spec[j] for j in (0, 2 + i))
    out = out.reshape(*out.shape[:batch], n, out.shape[batch] // n, *out.shape[batch + 1 :])
    return jnp.moveaxis(out, batch, dim).reshape(eqn.outvars[0].aval.shape)


# --- products -----------------------------------------------------------------------------------------------------------


def _window(eqn: Any) -> tuple[str, ...] | None:
    """Returns what the window does along each spatial dim: "meets" each entry of the input alone, "sums" all of them, or
    "spreads" the only one. None if it slides along one of them."""
    numbers, params, found = eqn.params["dimension_numbers"], eqn.params, []
    x, weight = (atom.aval.shape for atom in eqn.invars)
    for i, (dim, of_weight) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        n, size, padding, stride = x[dim], weight[of_weight], tuple(params["padding"][i]), params["window_strides"][i]
        is_dense = (n == 1 or params["lhs_dilation"][i] == 1) and (size == 1 or params["rhs_dilation"][i] == 1)
        if is_dense and size == 1 and padding == (0, 0) and (stride == 1 or n == 1):
            found.append("meets")
        elif is_dense and size == n and padding == (0, 0):
            found.append("sums")
        elif is_dense and n == 1 and padding == (size - 1, size - 1) and stride == 1:
            found.append("spreads")
        else:
            return None
    return tuple(found)


def _product(eqn: Any, x: jax.Array, weight: jax.Array, window: Sequence[str]) -> jax.Array:
    """Returns a grouped convolution whose window does not slide, by a product for each group."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    x, weight = jnp.transpose(x, numbers.lhs_spec), jnp.transpose(weight, numbers.rhs_spec)
    if params["batch_group_count"] > 1:
        x = rearrange(x, "(g n) i ... -> n g i ...", g=(n_groups := params["batch_group_count"]))
    else:
        x = rearrange(x, "n (g i) ... -> n g i ...", g=(n_groups := params["feature_group_count"]))
    weight = rearrange(weight, "(g o) i ... -> g o i ...", g=n_groups)
    spreading = [3 + i for i, does in enumerate(window) if does == "spreads"]
    x, weight = jnp.squeeze(x, spreading), jnp.flip(weight, spreading)
    weight = jnp.squeeze(weight, [3 + i for i, does in enumerate(window) if does == "meets"])
    n, g, i, o, *space = range(4 + len(window))
    in_x, in_weight, in_out = (
        [dim for dim, does in zip(space, window, strict=True) if does != unlike] for unlike in ("spreads", "meets", "sums")
    )
    out = jnp.einsum(
        *(x, [n, g, i, *in_x], weight, [g, o, i, *in_weight], [n, g, o, *in_out]),
        precision=params["precision"], preferred_element_type=params["preferred_element_type"],
    )  # fmt: skip
    out = jnp.expand_dims(
        rearrange(out, "n g o ... -> n (g o) ..."), [2 + i for i, does in enumerate(window) if does == "sums"]
    )
    return jnp.transpose(out, [numbers.out_spec.index(dim) for dim in range(out.ndim)]).astype(eqn.outvars[0].aval.dtype)


def _with_groups(x: jax.Array, dim: int, n_groups: int, n_added: int) -> jax.Array:
    """Returns an array with groups of zeros after those of a dim."""
    if not n_added:
        return x
    size = x.shape[dim] // n_groups * n_added
    return jnp.pad(x, [(0, size if i == dim else 0) for i in range(x.ndim)])
