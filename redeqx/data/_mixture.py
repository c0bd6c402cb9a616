"""Mixtures of sources by weight, in exact proportions.

Owns the share of each source, and which of its examples is next. Every source is an endless sequence of passes over it, each
in an order drawn from the seed, the source's name and the pass. A mixture takes from each sequence in turn: every example of
a source is used once before any is repeated.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any, SupportsIndex, overload

import numpy as np

from ..errors import check_count, with_names
from ._examples import check_examples, examples_of, size_of
from ._streams import Stream


class Mixture(Sequence[Any]):
    """Examples of several sources by weight, as one object with `len()` and integer items.

    An epoch has `size` examples. Each source has its share of them to within one example (largest remainder), spread evenly.
    Each epoch continues in every source where the previous one ended. A source with fewer examples than its share is
    repeated in whole passes, each in another order. `Trainer.fit` sets the epoch, shuffles, and resumes at the same example.

    `shares` is the number of examples of each source in an epoch, by name.

    **Arguments:**

    - `sources`: for each name `(examples, weight)`: examples with `len()` and integer items, and a positive number. Weights
        need not sum to 1.
    - `size`: the number of examples in an epoch; by default the sum over all sources.
    - `seed`: for the orders.

    Raises TypeError for sources of another form and for iterables, which `MixtureStream` mixes; ValueError for weights that
    are not positive, and for a size in which a source has no share. Uses 20 bytes per example of an epoch.
    """

    @with_names
    def __init__(self, sources: Mapping[str, tuple[Any, float]], *, size: int | None = None, seed: int = 0):
        self._sources, weights = _checked(sources, "Mixture")
        check_count(size, "size", optional=True)
        check_count(seed, "seed", 0)
        for name, examples in self._sources.items():
            if size_of(examples) is None or hasattr(examples, "set_epoch"):
                raise TypeError(
                    f"`sources[{name!r}]`: expected examples with `len()` and integer items that no epoch changes, got "
                    f"{type(examples).__name__}. Mix iterables with `MixtureStream`; list a mixture's own sources."
                )
        size = sum(map(len, self._sources.values())) if size is None else int(size)
        self.shares = dict(zip(self._sources, _apportion(weights, size), strict=True))
        if empty := [name for name, share in self.shares.items() if not share]:
            least = math.ceil(1 / weights[list(self.shares).index(empty[0])])
            raise ValueError(
                f"`size`: expected examples of each source in an epoch, got {size}, of which `{empty[0]}` has none by its "
                f"weight. Pass {least} or more, or leave the source out."
            )
        self._seed, self._epoch = int(seed), 0
        self._taken: list[np.ndarray] | None = None  # for each source, the indices of the epoch's examples
        shares = list(self.shares.values())
        at = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        order = np.argsort(at, kind="stable")
        self._source = np.repeat(np.arange(len(shares), dtype=np.int32), shares)[order]
        self._nth = np.concatenate([np.arange(share) for share in shares])[order]

    def set_epoch(self, epoch: int) -> None:
        """Switches `len()` and items to those of this epoch, counted from 0."""
        check_count(epoch, "epoch", 0)
        if epoch != self._epoch:
            self._epoch, self._taken = int(epoch), None

    def __len__(self) -> int:
        return len(self._nth)

    @overload
    def __getitem__(self, i: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> list[Any]: ...
    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if self._taken is None:
            self._taken = [
                _passes(name, len(examples), self._seed, self._epoch * self.shares[name], self.shares[name])
                for name, examples in self._sources.items()
            ]
        source = int(self._source[i])
        return list(self._sources.values())[source][int(self._taken[source][self._nth[i]])]


class MixtureStream:
    """Examples of several sources by weight, as an endless iterable; the sources may be iterables too.

    At every point it has taken the share of each source to within one example. A source that ends starts again: one with
    `len()` and integer items in another order; a function is called with the number of the pass, and so is a `set_epoch`
    method. Its iterators have `get_state` and `set_state`, and `Trainer.fit` saves and sets their state; on resuming, a
    source whose state cannot be saved is read up to its position. Since it has no end, pass `max_steps` to `fit`.

    **Arguments:**

    - `sources`: for each name `(examples, weight)`: anything that `fit` takes as `train_examples`, and a positive number.
    - `seed`: for the orders of sources with `len()` and integer items.

    Raises TypeError for sources of another form, ValueError for weights that are not positive; ValueError while iterating
    for a pass without examples.
    """

    @with_names
    def __init__(self, sources: Mapping[str, tuple[Any, float]], *, seed: int = 0):
        self._sources, self._weights = _checked(sources, "MixtureStream")
        check_count(seed, "seed", 0)
        self._seed = int(seed)

    def __iter__(self) -> "_MixtureIterator":
        passes = [_Passes(name, examples, self._seed) for name, examples in self._sources.items()]
        return _MixtureIterator(passes, self._weights)


class _MixtureIterator(Iterator[Any]):
    """Takes each example from the source whose deadline comes first.

    In terms of scheduling: example `c` of a source with weight `w` is released at place `floor(c / w)` and due before place
    `ceil((c + 1) / w)`. Earliest deadline first meets all deadlines.
    """

    def __init__(self, sources: "list[_Passes]", weights: list[Fraction]):
        self._sources, self._weights = sources, weights

    def __next__(self) -> Any:
        n = sum(source.n for source in self._sources)
        each = list(zip(self._sources, self._weights, strict=True))
        due = [
            (math.ceil((source.n + 1) / weight), i) for i, (source, weight) in enumerate(each) if source.n < weight * (n + 1)
        ]
        return self._sources[min(due)[1]].take()

    def get_state(self) -> dict[str, Any]:
        return {source.name: source.state() for source in self._sources}

    def set_state(self, state: dict[str, Any]) -> None:
        if state.keys() != {source.name for source in self._sources}:
            raise ValueError(
                f"`sources`: expected those of the resumed run, {sorted(state)}, got "
                f"{sorted(source.name for source in self._sources)}. Pass the same, or choose another workdir."
            )
        for source in self._sources:
            source.load(**state[source.name])


class _Passes:
    """An endless source: one pass after another. `n` is the number of examples taken so far."""

    def __init__(self, name: str, examples: Any, seed: int):
        self.name, self.n = name, 0
        self._examples, self._seed = examples, seed
        self._pass, self._position = 0, 0
        self._stream: Stream | None = None  # of this pass; None until its first example

    def take(self) -> Any:
        for _ in range(2):
            if self._stream is None:
                self._begin()
            assert self._stream is not None
            for example in self._stream:
                self.n, self._position = self.n + 1, self._position + 1
                return example
            if not self._position:
                break
            self._pass, self._position, self._stream = self._pass + 1, 0, None
        raise ValueError(
            f"`sources[{self.name!r}]`: expected examples in each pass, got none in pass {self._pass}. Pass what can be "
            "read again, or a function of the pass: `lambda epoch: ...`."
        )

    def state(self) -> dict[str, Any]:
        saved = None if self._stream is None else self._stream.state()
        return {"n": self.n, "pass_": self._pass, "position": self._position, "saved": saved}

    def load(self, n: int, pass_: int, position: int, saved: Any) -> None:
        self.n, self._pass, self._position = n, pass_, position
        self._stream = None
        if saved is not None:
            self._begin(saved)

    def _begin(self, saved: Any = None) -> None:
        """Starts or continues this pass."""
        examples = examples_of(self._examples, self._pass, f"sources[{self.name!r}]")
        if (n := size_of(examples)) is not None:
            examples = _Ordered(examples, _order(self.name, n, self._seed, self._pass))
        self._stream = Stream(examples, self._position, saved, f"sources[{self.name!r}]")


class _Ordered:
    """The items of a sequence in a given order, as an iterable."""

    def __init__(self, examples: Any, order: np.ndarray):
        self._examples, self._order = examples, order

    def __iter__(self) -> "_OrderedIterator":
        return _OrderedIterator(self._examples, self._order)


class _OrderedIterator(Iterator[Any]):
    def __init__(self, examples: Any, order: np.ndarray):
        self._examples, self._order, self._i = examples, order, 0

    def __next__(self) -> Any:
        if self._i == len(self._order):
            raise StopIteration
        self._i += 1
        return self._examples[int(self._order[self._i - 1])]

    def get_state(self) -> int:
        return self._i

    def set_state(self, state: int) -> None:
        self._i = state


def _order(name: str, n: int, seed: int, pass_: int) -> np.ndarray:
    """Returns the order of a source in a pass. It does not depend on other sources."""
    return np.random.default_rng((seed, zlib.crc32(name.encode()), pass_)).permutation(n)


def _passes(name: str, n: int, seed: int, start: int, count: int) -> np.ndarray:
    """Returns the indices of `count` examples of a source of `n`, in consecutive passes, from the example `start` on."""
    if n == 1:  # avoid one permutation per example
        return np.zeros(count, np.int64)
    first, last = start // n, (start + count - 1) // n
    orders = [_order(name, n, seed, i) for i in range(first, last + 1)]
    return np.concatenate(orders)[start - first * n :][:count].copy()


def _apportion(weights: list[Fraction], size: int) -> list[int]:
    """Divides `size` into whole shares by largest remainder; ties go to the first."""
    shares = [math.floor(weight * size) for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - weights[i] * size)
    for i in by_remainder[: size - sum(shares)]:
        shares[i] += 1
    return shares


def _checked(sources: Any, of: str) -> tuple[dict[str, Any], list[Fraction]]:
    """Returns the examples of each source by name, and the weights, which sum to 1."""
    if not isinstance(sources, Mapping) or not sources:
        found = "none" if isinstance(sources, Mapping) else type(sources).__name__
        raise TypeError(
            f"`sources`: expected a dict of `(examples, weight)` by name, got {found}. "
            f'Write `{of}({{"code": (code, 0.7), "text": (text, 0.3)}})`.'
        )
    examples, weights = {}, []
    for name, pair in sources.items():
        where = f"sources[{name!r}]"
        if not isinstance(name, str) or not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"`{where}`: expected `(examples, weight)` by a name, got {type(pair).__name__}. Pass a tuple of both."
            )
        examples[name], weight = pair
        check_examples(examples[name], where)
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(f"`{where}`: expected a number as the weight, got {type(weight).__name__}. Pass 0.5, say.")
        if not 0 < float(weight) < math.inf:
            raise ValueError(f"`{where}`: expected a positive weight, got {weight}. Leave a source out that has no share.")
        weights.append(Fraction(str(weight)))  # 0.7 is exactly 7 / 10
    return examples, [weight / sum(weights) for weight in weights]
