"""Redco's names: using one as an attribute or an argument of a facade raises an error with the name in redeqx. So does
assigning to an argument, which would change nothing."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ._user_code import filter_traceback


class RedcoNames:
    """A base class that raises helpful errors for Redco's attributes and constructor arguments."""

    _redco_attributes: ClassVar[Mapping[str, str]] = {}
    _redco_arguments: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers must still report names that do not exist

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if "_redco_arguments" in vars(cls):  # a user's subclass has arguments and attributes of its own
                cls._arguments = frozenset(inspect.signature(cls.__init__).parameters)
                cls.__init__ = filter_traceback(cls.__init__, cls._redco_arguments)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in vars(type(self)).get("_arguments", ()):
                cls = type(self).__name__
                advice = f"Create another {cls} with `{name}=`"
                message = f"`{cls}.{name}`: expected to be read only, got an assignment. {advice}."
                raise AttributeError(message, name=name, obj=self)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if (advice := self._redco_attributes.get(name)) is not None:
                message = f"`{type(self).__name__}.{name}`: expected a name of redeqx, got one of Redco. {advice}"
                raise AttributeError(message, name=name, obj=self)
            return object.__getattribute__(self, name)  # raises the usual AttributeError


REDCO_DEPLOYER = {
    "gen_rng": "Call `next_key()`.",
    "gen_model_step_rng": "Leave it out: `loss_fn` and `pred_fn` are given a key.",
    "get_sharding_rules": "Call `plan(model, loss_fn, batch)`, or leave it out: the trainer makes the plan.",
    "get_params_spec": "Read `plan(model, loss_fn, batch)[name].spec`.",
    "get_opt_state_spec": "Leave it out: the optimizer's state is split as the model is.",
    "shard_params": "Make the model by `init(make_model)`, or leave it out: the trainer places it.",
    "run_model_step": "Leave it out: the trainer and the predictor do so. For a step of your own use `jax.jit`.",
    "get_model_input_batches": "Pass the examples to the trainer or the predictor.",
    "get_local_global_micro_batch_size": "Pass `batch_size`, the examples of an update over all devices.",
    "save_ckpt": "Call `Trainer.save_ckpt`.",
    "load_ckpt": "Call `Trainer.load_ckpt`, or `redeqx.load` for the model alone.",
    "load_last_ckpt": "Leave it out: `fit` continues the run of its workdir. `redeqx.load` reads the model alone.",
    "load_params_shape": "Pass shapes to `redeqx.load`: `eqx.filter_eval_shape(Model, key)`.",
}
REDCO_TRAINER = {
    "set_train_state": "Make a new trainer, or call `load_ckpt`.",
    "setup_running_step": "Call `compile(examples, per_device_batch_size)`.",
    "get_params_to_save": "Read `model`.",
    "state": "Read `model`, `opt_state` and `step`.",
    "mesh": "Read `deployer.mesh`.",
    "workdir": "Read `deployer.workdir`.",
}
REDCO_TRAINER_ARGUMENTS = {
    "apply_fn": "Leave it out: `loss_fn` calls the model.",
    "compute_dtype": "Pass `compute='bfloat16'`, which keeps parameters in float32, or a `redeqx.Compute`.",
    "params": "Pass the Equinox module as `model`.",
    "params_sharding_rules": "Leave it out, or pass `plan=deployer.plan(model, loss_fn, batch, overrides={...})`.",
    "opt_state": "Leave it out: `load_ckpt` and a rerun of the script restore it.",
    "last_ckpt_info": "Leave it out: a rerun of the script continues the run of its workdir.",
    "train_step_fn": "Pass `grad_fn` for gradients of your own, or write the loop with `update`.",
}
REDCO_PREDICTOR_ARGUMENTS = {
    "params": "Pass the Equinox module as `model`.",
    "params_sharding_rules": "Leave it out: the plan is made from `pred_fn`.",
}
REDCO_PREDICTOR = {
    "setup_running_step": "Call `predict`, which compiles at its first batch.",
    "mesh": "Read the `mesh` of its deployer.",
}
