"""EMA: the callback that keeps an exponential moving average of the weights."""

from collections.abc import Iterable
from typing import Any

import optax

from .._tree import PyTree
from ..errors import check_number
from ._averages import Averaging, as_model, averages_in
from ._callbacks import Callback


class EMA(Callback):
    """Keeps an exponential moving average of the trained weights, evaluates it and saves it with the model.

    After each step `average = decay * average + (1 - decay) * weights`. It begins with the weights at the start of the fit,
    or with those of the resumed checkpoint if this has no average. Evaluations report `ema_loss` (and each other metric of
    the loss) in addition to `loss`. Checkpoints hold the averaged model as `ema.safetensors`.

    ```python
    ema = redeqx.EMA(decay=0.999)
    trainer.fit(
        examples, batch_size=32, n_epochs=10, eval_examples=held_out, save_argmin_ckpt_by_metrics=["ema_loss"],
        callbacks=[ema],
    )
    predictor.predict(examples, batch_size=32, model=ema.model)
    ```

    **Arguments:**

    - `decay`: the weight of the old average in the update, in [0, 1).
    - `name`: the prefix of metrics and the name of the file; two averages need two names.

    Raises ValueError for another decay, TypeError for anything but a number.
    """

    decay: float
    name: str

    def __init__(self, decay: int | float = 0.999, *, name: str = "ema"):
        advice = "0.999 averages about 1000 steps."
        check_number(decay, "decay", "a number from 0 to below 1", lambda decay: 0 <= decay < 1, advice)
        if not name.isidentifier() or name in ("model", "model_state", "optimizer", "callbacks", "eval"):
            raise ValueError(f"`name`: expected an identifier that names no other file, got {name!r}. Pass 'ema', say.")
        self.decay, self.name = decay, name
        self._trainer: Any = None

    @property
    def model(self) -> PyTree:
        """The averaged model, in the dtypes of the trained one. The next step deletes its arrays, as those of
        `trainer.model`.

        Raises ValueError before the fit has started.
        """
        if self._trainer is None:
            raise ValueError("`EMA.model`: expected a fit that has started, got none. Pass the callback to `fit` first.")
        return self.models(self._trainer)[self.name]

    def wrap_optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        if not isinstance(optimizer, Averaging) or not self._is_in(optimizer):
            return Averaging.of(optimizer, self.name, self.decay)
        if optimizer.name != self.name:
            inner = self.wrap_optimizer(optimizer.inner)
            return optimizer if inner is optimizer.inner else Averaging.of(inner, optimizer.name, optimizer.decay)
        return optimizer if optimizer.decay == self.decay else Averaging.of(optimizer.inner, self.name, self.decay)

    def _is_in(self, optimizer: Any) -> bool:
        return isinstance(optimizer, Averaging) and (optimizer.name == self.name or self._is_in(optimizer.inner))

    def models(self, trainer: Any) -> dict[str, PyTree]:
        return {self.name: as_model(averages_in(trainer.opt_state)[self.name], trainer.model)}


def attach(callbacks: Iterable[Callback], trainer: Any) -> None:
    """Sets the trainer of a fit's averages, even for a finished fit. Raises ValueError for two of the same name."""
    averages = [callback for callback in callbacks if isinstance(callback, EMA)]
    names = [callback.name for callback in averages]
    for callback in averages:
        callback._trainer = trainer
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"`callbacks`: expected averages with names of their own, got {name!r} twice. Pass `EMA(name='slow')`, say."
            )
