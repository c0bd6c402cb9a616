"""The options of `Trainer.fit`: listed, checked and turned into a signature in one place."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..data import check_examples, size_of
from ..errors import (
    FilteredTraceback,
    check_count,
    check_float_dtype,
    check_function,
    check_names,
    check_predictor,
    check_readable_again,
)
from ..storage import Location
from ._callbacks import Callbacks

P = ParamSpec("P")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `Trainer.fit`, which documents them."""

    train_examples: Any
    per_device_batch_size: int | None = None
    n_epochs: int | None = None
    _: KW_ONLY
    max_steps: int | None = None
    batch_size: int | None = None
    drop_remainder: bool = False
    eval_examples: Any = None
    eval_per_device_batch_size: int | None = None
    eval_batch_size: int | None = None
    eval_loss: bool = True
    eval_predictor: Any = None
    eval_metric_fn: Callable[[Any, list[Any]], Mapping[str, Any]] | None = None
    eval_sanity_check: bool = True
    eval_every_n_steps: int | None = None
    save_every_n_steps: int | None = None
    save_ckpt_every_k_epochs: int | None = None
    save_last_ckpt: bool = False
    save_argmin_ckpt_by_metrics: Sequence[str] = ()
    save_argmax_ckpt_by_metrics: Sequence[str] = ()
    save_end: bool = True
    keep_last: int = 2
    save_opt_states: bool = True
    save_float_dtype: Any = None
    resume: bool = True
    callbacks: Sequence[Any] = ()

    @property
    def epochs(self) -> int | None:
        """The number of epochs; None if only `max_steps` ends the fit."""
        return 1 if self.n_epochs is None and self.max_steps is None else self.n_epochs

    @property
    def tracked(self) -> dict[str, tuple[str, float]]:
        """Maps each tag of a best checkpoint to its metric, and to +1 if more is better, -1 if less is."""
        least = {f"argmin_{name}": (name, -1.0) for name in self.save_argmin_ckpt_by_metrics}
        return {**least, **{f"argmax_{name}": (name, 1.0) for name in self.save_argmax_ckpt_by_metrics}}

    @property
    def plain(self) -> dict[str, Any]:
        """The scalar options, and the sizes of the datasets."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sizes = {f"len({name})": size_of(values[name]) for name in ("train_examples", "eval_examples")}
        return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)} | sizes

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate."""
        return self.eval_examples is not None and (self.eval_loss or self.eval_metric_fn is not None)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are requested in addition to the one at the end."""
        return bool(self.save_every_n_steps or self.save_ckpt_every_k_epochs or self.save_last_ckpt or self.tracked)

    def check(self, workdir: Location | None) -> None:
        """Raises ValueError or TypeError for invalid arguments."""
        check_count(self.keep_last, "keep_last")
        check_float_dtype(self.save_float_dtype, "save_float_dtype", "Pass None to save what the model has.")
        for name in ("n_epochs", "max_steps", "eval_every_n_steps", "save_every_n_steps", "save_ckpt_every_k_epochs"):
            check_count(getattr(self, name), name, optional=True)
        for name in ("save_argmin_ckpt_by_metrics", "save_argmax_ckpt_by_metrics"):
            if isinstance(getattr(self, name), str):
                raise TypeError(
                    f"`{name}`: expected names of metrics in a list, got a string. Write [{getattr(self, name)!r}]."
                )
        check_examples(self.train_examples)
        check_readable_again(self.train_examples, "train_examples", self.epochs or 1)
        Callbacks.check(self.callbacks)
        if self.eval_examples is not None and size_of(self.eval_examples) is None:
            found = type(self.eval_examples).__name__
            raise TypeError(f"`eval_examples`: expected `len()` and integer items, got {found}. Pass a list.")
        if self.eval_examples is not None:
            check_examples(self.eval_examples, "eval_examples")
        if self.eval_metric_fn is not None:
            check_function(self.eval_metric_fn, "eval_metric_fn", ["examples", "outputs"])
        if self.eval_predictor is not None:
            check_predictor(self.eval_predictor)
        if self.eval_metric_fn is not None and self.eval_predictor is None:
            raise ValueError("`eval_metric_fn`: expected with an `eval_predictor`, got None. Pass the predictor too.")
        of_callbacks = any(callback.needs_eval for callback in self.callbacks)
        needs_eval = self.eval_predictor is not None or self.eval_every_n_steps or self.tracked or of_callbacks
        if needs_eval and not self.evaluates:
            raise ValueError(
                "`eval_examples`: expected examples and something to evaluate, got "
                f"{'none' if self.eval_examples is None else 'no `eval_loss` and no `eval_metric_fn`'}. "
                "The evaluation that was asked for needs them."
            )
        if self.saves and workdir is None:
            raise ValueError("`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`.")


def with_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Any, Options], Result]], Callable[Concatenate[Any, P], Result]]:
    """Decorates a method of `(self, options)`, so that it is called, documented and type-checked with the fields of a
    dataclass of options as arguments. Its errors show only the user's frames."""
    parameters = inspect.signature(options).parameters.values()

    def decorate(method: Callable[[Any, Options], Result]) -> Callable[Concatenate[Any, P], Result]:
        own = inspect.signature(method)
        signature = own.replace(parameters=[next(iter(own.parameters.values())), *parameters])

        @functools.wraps(method)
        def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> Result:
            with FilteredTraceback():
                check_names(signature, method.__name__, args, kwargs)
                return method(self, options(*args, **kwargs))

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate
