"""The Predictor: runs a model and `pred_fn` over any number of examples, in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from ._deployer import Deployer
from ._load import Saved
from ._tree import PyTree, array_leaves, as_bare_shapes, bare_shape, is_array_like
from .data import BatchSize, CollatePool, Prefetch, batches, collated_shapes, drawn_ahead, known_size, slices
from .dims import RowUse, with_rows
from .distributed import RowCheck, agree_on_examples
from .errors import (
    REDCO_PREDICTOR,
    REDCO_PREDICTOR_ARGUMENTS,
    Once,
    RedcoNames,
    check_alike,
    check_alive,
    check_function,
    check_key,
    check_model,
    check_model_function,
    check_state,
    check_type,
    filter_traceback,
    warn,
    with_batch_note,
)
from .machine import dry, n_batch_shards, put, replicated, split_rows, xla_settings
from .partition import Plan, check_plan, describe_positions, make_plan, place
from .steps import (
    Compute,
    Precision,
    Program,
    Structure,
    effective_specs,
    make_predict_step,
    placed_shape,
    placed_shapes,
    prediction,
    row_span,
    weak_types,
    with_weak_types,
)
from .storage import Location
from .tracing import Trace
from .training import CalledSteps, Engine


class Predictor(RedcoNames):
    """Runs `pred_fn` on a model, batch by batch, on the deployer's mesh.

    **Arguments:**

    - `deployer`: the devices.
    - `model`: an Equinox module; switched to inference mode for `pred_fn`. None if each `predict` passes its own.
    - `collate_fn`: maps a list of examples to a PyTree of numpy arrays with one row per example.
    - `pred_fn`: maps `(model, batch, key)`, or with `model_state` `(model, state, batch, key)`, to a PyTree of arrays with
        one row per example. Rows must not depend on each other: the last batch is padded with copies of its last row.
    - `output_fn`: maps the outputs of a batch (numpy, without padding) to a list with one entry per example; by default a
        list of the rows.
    - `model_state`: the state of layers that have one, from `eqx.nn.make_with_state`.
    - `compute`: as for `Trainer`; its dtype and `fuse_attention` apply.
    - `plan`: how the model is split; by default in the order in which `pred_fn` computes. It is then traced for the shapes
        of the first batch, and the model is placed only after that.
    """

    _redco_attributes, _redco_arguments = REDCO_PREDICTOR, REDCO_PREDICTOR_ARGUMENTS

    def __init__(
        self,
        deployer: Deployer,
        *,
        model: PyTree | None = None,
        collate_fn: Callable[[list[Any]], PyTree],
        pred_fn: Callable[..., PyTree],
        output_fn: Callable[[PyTree], list[Any]] | None = None,
        model_state: PyTree | None = None,
        compute: Compute | Precision | str | None = None,
        plan: Plan | None = None,
    ):
        check_type(deployer, Deployer, "deployer")
        if model is not None:
            check_model(model)
            check_model_function(pred_fn, "pred_fn", has_state=model_state is not None)
        check_state(model_state)
        check_function(collate_fn, "collate_fn", ["examples"])
        if output_fn is not None:
            check_function(output_fn, "output_fn", ["outputs"])
        compute = Compute.of(compute)
        check_plan(plan)
        self._deployer = deployer
        self._model = model
        self._collate_fn = collate_fn
        self._pred_fn = with_batch_note(with_weak_types(pred_fn, weak_types(model_state)), "pred_fn")
        self._output_fn = output_fn or _rows
        self._model_state = model_state
        self._compute = compute
        if plan is not None and model is not None:
            plan.check(model)
        self._plan = None if plan is None else plan.on(deployer.mesh)
        self._step: tuple[Any, Structure, Callable[..., Any]] | None = None
        self._called = CalledSteps(deployer, "predict step", "pred_fn")
        self._placed: tuple[PyTree, PyTree] | None = None
        self._read: Callable[[Plan], PyTree] | None = None  # reads the model, of which `_model` has the shapes
        self._engine: Engine | None = None  # of the Trainer whose model this is
        self._say_once = Once(deployer.console.info)

    @classmethod
    @filter_traceback
    def load(
        cls, path: str | Location, deployer: Deployer, *, like: PyTree, plan: Plan | None = None, **options: Any
    ) -> "Predictor":
        """Returns a Predictor for the model in a checkpoint or a safetensors file.

        **Arguments:**

        - `path`, `like`: as for `redeqx.load`.
        - `plan`, `options`: as for `Predictor`. With a `plan`, the tensors are read at once. Without one, this call checks
            that they are those of `like`, and the first batch reads them, each device its own slices: keep the files until
            then.

        Raises as `redeqx.load` does.
        """
        check_type(deployer, Deployer, "deployer")
        check_model(like, "like")
        if "model" in options:
            raise TypeError("`load(model=)`: expected the model as `like` alone, got both. Leave `model` out.")
        check_plan(plan)
        saved = Saved.at(path, like, deployer)
        if plan is not None:
            return cls(deployer, model=saved.read(plan.on(deployer.mesh)), plan=plan, **options)
        saved.match()
        predictor = cls(deployer, model=like, **options)
        predictor._read = saved.read
        return predictor

    @property
    def plan(self) -> Plan | None:
        """How the model is split: the given plan, that of the trainer, or the one made for the first batch; None before."""
        return self._plan if self._engine is None else self._engine.plan

    @filter_traceback
    def predict(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        model: PyTree | None = None,
        *,
        batch_size: int | None = None,
        key: PRNGKeyArray | None = None,
    ) -> list[Any]:
        """Returns the outputs of all examples, in order.

        **Arguments:**

        - `examples`: anything with `len()` and integer items.
        - `per_device_batch_size`, `batch_size`: rows at one position of the data and fsdp axes, or examples over all
            devices; pass one of the two.
        - `model`: replaces the Predictor's own, with the same structure.
        - `key`: the key that `pred_fn` receives. A draw for rows takes for each row its number among all examples, so
            samples do not depend on the batch size. By default the key comes from the deployer's seed and is the same at
            every call: pass a new one where calls must differ (samples, a policy's actions).

        Raises ValueError if `output_fn` does not return one entry per example.
        """
        batches = self.iterate(examples, per_device_batch_size, model, batch_size=batch_size, key=key)
        with self._deployer.watch.on():
            return [row for batch in batches for row in batch]

    @filter_traceback
    def iterate(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        model: PyTree | None = None,
        *,
        batch_size: int | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Iterator[list[Any]]:
        """Returns an iterator over the outputs of one batch after the other, for more outputs than fit into the host's
        memory. The arguments are those of `predict`, and are checked at the call.

        Raises ValueError if a trainer updates the model, and so deletes its arrays, before the last batch.
        """
        size = BatchSize.of(self._deployer.mesh, per_device_batch_size, batch_size)
        n = known_size(examples)
        if model is not None:
            self._check_alike(model)
        elif self._engine is None:
            self._require_model(model)
        if key is not None:
            check_key(key)
        agree_on_examples(self._deployer.peers, "predict", n, size.examples)
        if n == 0:
            return iter(())
        at_once, n_shards = min(size.examples, n), self._deployer.n_batch_shards
        padded = BatchSize(at_once, -(-at_once // n_shards) * n_shards, pads=True)
        outputs = self._zeros if self._deployer.is_dry_run else self._outputs
        key = jax.random.key(self._deployer.jax_seed) if key is None else key
        return outputs(examples, n, padded, model, key)

    def _outputs(
        self, examples: Any, n: int, size: BatchSize, model: PyTree | None, key: PRNGKeyArray
    ) -> Iterator[list[Any]]:
        """Yields the outputs of `n` examples."""
        mesh, peers = self._deployer.mesh, self._deployer.peers
        check = None if peers.n == 1 else RowCheck(peers, self._deployer.console.info)
        steps = slices(examples, size.examples, name="examples", n=n)
        key = put(key, replicated(mesh))
        line = self._deployer.console.progress(title="predict")  # shown while a batch of new shapes is compiled

        def computed(upcoming: Prefetch, model: PyTree | None) -> Iterator[tuple[int, PyTree]]:
            start = 0
            for batch in upcoming:
                peers.check()
                if start == 0:
                    model, state, plan = self._resolve(model, batch.micro_batch)
                    structure, step = self._get_step(model, state, plan)
                    arrays = (*structure.take(model), jax.tree.leaves(state))
                if any(x.is_deleted() for x in jax.tree.leaves(arrays)):
                    self._check_alive(model, state)
                args = (*arrays, batch.groups[0], key, row_span(start, n))
                outputs = self._called.call(step, args, batch.signature, line)
                start += batch.n_examples
                self._deployer.watch.beat()
                jax.tree.map(lambda x: x.copy_to_host_async(), outputs)
                yield batch.n_examples, outputs

        with closing(batches(steps, CollatePool(self._collate_fn), size, mesh, check)) as upcoming:
            # The device computes one batch while the previous one is returned.
            yield from starmap(self._unbatch, drawn_ahead(computed(upcoming, model), 1))

    def _zeros(self, examples: Any, n: int, size: BatchSize, model: PyTree | None, key: PRNGKeyArray) -> Iterator[list[Any]]:
        """Yields zeros in place of the outputs, so that a script that predicts before its first `fit` reaches it in a dry
        run. They have the shapes of the first batch, since only that one is collated."""
        if (run := dry()) is not None and "predictions" not in run.zeros:
            run.zeros.add("predictions")
            self._deployer.console.info("dry run: nothing has a value before the first `fit`: `predict` returns zeros")
        first = [examples[i] for i in range(size.examples)]
        batch = with_rows(collated_shapes(self._collate_fn, first), size.micro_batch)
        if self._engine is not None:
            own, state = self._engine.trees
            plan, model = self._make_plan(own, state, batch), own if model is None else model
        else:
            model, state = self._require_model(model), self._model_state
            plan = self._plan = self._plan or self._make_plan(model, self._model_state, batch)
        structure, step = self._get_step(model, state, plan)
        group = jax.tree.map(lambda x: bare_shape(x, (1, *x.shape)), batch)
        shapes = jax.eval_shape(step, *structure.take(model), jax.tree.leaves(state), group, key, row_span(0, n))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        for start in range(0, n, size.examples):
            yield self._unbatch(min(size.examples, n - start), zeros)

    def trace(self, model: PyTree, examples: Sequence[Any], per_device_batch_size: int, program: Program) -> Any:
        """Traces the step for the first batch of examples, with a trainer's model sharded as in `program`."""
        mesh = program.plan.mesh
        n_shards = n_batch_shards(mesh)
        batch_size = min(per_device_batch_size * n_shards, -(-len(examples) // n_shards) * n_shards)
        batch = with_rows(collated_shapes(self._collate_fn, examples[:batch_size]), batch_size)
        group = jax.tree.map(lambda x: placed_shape(bare_shape(x, (1, *x.shape)), split_rows(mesh, dim=1)), batch)
        structure = Structure.of(model)
        step = self._make_step(structure, program.plan, program.model_state(program.state), named=True)
        key = placed_shape(jax.eval_shape(lambda: jax.random.key(0)), replicated(mesh))
        span = jax.ShapeDtypeStruct((2,), np.uint32)
        return step.trace(*placed_shapes(structure, model, program.plan), program.state.layers, group, key, span)

    def _unbatch(self, n_rows: int, outputs: PyTree) -> list[Any]:
        listed = self._output_fn(jax.tree.map(lambda x: _on_host(x)[:n_rows], outputs))
        is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
        if not is_list or len(listed) != n_rows:
            found = f"{len(listed)} entries" if is_list else type(listed).__name__
            raise ValueError(
                f"`output_fn`: expected a list of {n_rows} entries, one for each example, got {found}. "
                "Return a list with an entry for each row of the batch."
            )
        return list(listed)

    def _resolve(self, model: PyTree | None, batch: PyTree) -> tuple[PyTree, PyTree, Plan]:
        """Returns the placed model and state to run, and their plan, which is made for this batch if there is none yet."""
        self._check_alive(self._model if model is None else model, self._model_state)
        if self._engine is not None:
            own, state, plan = self._engine.to_predict(partial(self._make_plan, batch=batch))
            return (own if model is None else place(model, plan)), state, plan
        plan = self._plan = self._plan or self._make_plan(self._require_model(model), self._model_state, batch)
        if model is not None:
            return place(model, plan), self._placed_state(), plan
        if self._placed is None:
            own = self._model if self._read is None else self._read(plan)
            self._placed = place(own, plan), self._placed_state()
            self._model = self._read = None  # a second model would stay in memory
        return *self._placed, plan

    def _make_plan(self, model: PyTree, state: PyTree, batch: PyTree) -> Plan:
        """Returns the plan of a model, by the trace of `pred_fn` for the shapes of a batch; issues the plan's warnings."""
        structure, leaves, mesh = Structure.of(model), jax.tree.leaves(state), self._deployer.mesh
        predict = self._prediction(structure, state)

        def of_model(model: PyTree, *rest: Any) -> PyTree:
            trained, frozen = structure.take(model)
            return predict([*trained, *frozen], *rest)

        trace = Trace.of(of_model, model, *as_bare_shapes((leaves, batch)), jax.eval_shape(lambda: jax.random.key(0)))
        plan = make_plan(model, mesh, trace=trace)
        for message in plan.warnings:
            warn(message)
        # Other batches may have other lengths, so none is refused.
        return replace(plan, positions=describe_positions(trace, mesh, len(leaves), may_be_whole=True))

    def _placed_state(self) -> PyTree:
        return jax.tree.map(lambda leaf: put(leaf, replicated(self._deployer.mesh)), self._model_state)

    def _require_model(self, model: PyTree | None) -> PyTree:
        own = self._model if self._placed is None else self._placed[0]
        if model is None and own is None:
            raise ValueError("`model`: expected a model, got None. Pass it to `Predictor` or to `predict`.")
        return own if model is None else model

    def _check_alive(self, model: PyTree, state: PyTree) -> None:
        """Checks that no update of a trainer has deleted the arrays of a model and its state."""
        instead = "use `trainer.get_default_predictor`, which has the newest model at each call"
        if self._engine is not None:
            instead = "read all of `iterate` before the next update"
        advice = f"A training step deletes the arrays that it updates: {instead}, or keep"
        check_alive(model, "model", advice)
        check_alive(state, "model_state", advice)

    def _check_alike(self, model: PyTree) -> None:
        """Checks a model that replaces the Predictor's own, or the first one that it was given."""
        own = self._model if self._engine is None else self._engine.trees[0]
        if self.plan is not None:
            check_alike(model, self.plan.leaves, "the Predictor's model")
        elif own is not None:
            check_alike(model, array_leaves(own), "the Predictor's model")
        else:
            check_model(model)

    def _get_step(self, model: PyTree, state: PyTree, plan: Plan) -> tuple[Structure, Callable[..., Any]]:
        """Returns the compiled step, rebuilt if the model differs in more than its arrays."""
        arrays, static = eqx.partition(model, is_array_like)
        # Neither the reasons, which the first update replaces by those of the loss, nor axes of size 1.
        splits = [(name, effective_specs(plan, name)) for name in plan.leaves]
        signature = jax.tree.structure(arrays), jax.tree.leaves(static), plan.mesh, splits
        if self._step is None or self._step[0] != signature:
            structure = Structure.of(model)
            self._step = signature, structure, self._make_step(structure, plan, state)
        return self._step[1], self._step[2]

    def _prediction(self, structure: Structure, state: PyTree) -> Callable[..., PyTree]:
        check_model_function(self._pred_fn, "pred_fn", has_state=state is not None)
        treedef = None if state is None else jax.tree.structure(state)
        return prediction(structure, self._pred_fn, treedef, self._compute.dtype)

    def _make_step(self, structure: Structure, plan: Plan, state: PyTree, *, named: bool = False) -> Callable[..., Any]:
        predict = self._prediction(structure, state)
        options = xla_settings(plan.mesh, self._deployer.xla_settings).options
        judged = partial(_say_mixed, self._say_once)  # no method: in a cycle, arrays would stay
        return make_predict_step(structure, plan, self._compute, predict, named=named, options=options, judged=judged)


def _say_mixed(say: Callable[[str], None], use: RowUse) -> None:
    """Says if an output of a row depends, or may depend, on the batch in which it is."""
    if use.draws or not use.is_exact:
        depend = "may depend" if use.kind == "unknown" else "depend"
        text = "; ".join([*([] if use.is_exact else [use.text]), *use.draws])
        say(f"prediction: the outputs {depend} on the batch size. Rows: {text}")


def _on_host(x: Any) -> np.ndarray:
    """Returns an output as a NumPy array. One without entries, alone in its program, has shards that do not fit into it (jax
    0.10.2), so it is not fetched."""
    return np.asarray(x) if x.size else np.empty(x.shape, x.dtype)


def _rows(outputs: PyTree) -> list[Any]:
    """Splits a batch of outputs into a list of rows: arrays, or PyTrees of them."""
    leaves, treedef = jax.tree.flatten(outputs)
    return [jax.tree.unflatten(treedef, row) for row in zip(*leaves, strict=True)]
