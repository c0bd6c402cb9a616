"""A step whose devices compute more than their share gives a warning with the lines of code; a split step does not."""

import gc
import inspect
import os
import sys
import warnings
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.compiled import Module, excess, flops_by_line
from redeqx.tracing import shortened

ROWS, T, D, F, EXPERTS = 16, 8, 16, 64, 5
LINES = {}


def record_line(name):
    """Records the line of this call."""
    LINES[name] = inspect.stack()[1].lineno
    return lambda x: x


def recorded_line(name):
    return shortened(f"{__file__}:{LINES[name]}")


class Experts(eqx.Module):
    """A mixture of experts whose tokens are sorted into buffers by running sums and a scatter."""

    router: eqx.nn.Linear
    up: jax.Array
    down: jax.Array
    n_places: int = eqx.field(static=True)  # of an expert's buffer

    def __init__(self, n_places=51):
        self.n_places = n_places
        keys = jax.random.split(jax.random.key(0), 3)
        self.router = eqx.nn.Linear(D, EXPERTS, key=keys[0])
        self.up, self.down = jax.random.normal(keys[1], (EXPERTS, D, F)), jax.random.normal(keys[2], (EXPERTS, F, D))

    def __call__(self, tokens):
        expert = jnp.argmax(jax.vmap(self.router)(tokens), -1)
        place = record_line("place")(
            jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32), 0)[jnp.arange(len(tokens)), expert] - 1
        )
        buffers = record_line("scatter")(jnp.zeros((EXPERTS, self.n_places, D)).at[expert, place].set(tokens, mode="drop"))
        hidden = jax.nn.relu(record_line("up")(jnp.einsum("end,edf->enf", buffers, self.up)))
        out = record_line("down")(jnp.einsum("enf,efd->end", hidden, self.down))
        return out.at[expert, place].get(mode="fill", fill_value=0)


def loss_over_all_tokens(model, batch, key):
    return jnp.square(model(batch.reshape(-1, D))).mean()


def loss_per_example(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


def cell(w, z, x):
    return jnp.tanh(w @ z + x)


@jax.custom_vjp
def fixed_point_solve(w, x):
    return jax.lax.while_loop(lambda c: c[0] < 8, lambda c: (c[0] + 1, cell(w, c[1], x)), (0, x))[1]


def fixed_point_solve_backward(saved, g):
    """Implicit derivative with a dense Jacobian, the default of many solvers."""
    w, x, z = saved
    u = jnp.linalg.solve(jnp.eye(D) - jax.jacfwd(lambda z: cell(w, z, x))(z).T, g)
    return jax.vjp(lambda w, x: cell(w, z, x), w, x)[1](u)


fixed_point_solve.defvjp(lambda w, x: ((z := fixed_point_solve(w, x)), (w, x, z)), fixed_point_solve_backward)


def fixed_point_loss(model, batch, key):
    return jnp.square(jax.vmap(lambda x: record_line("solve")(fixed_point_solve(model["w"], x)))(batch[:, 0])).mean()


def first_step_warnings(model, loss, n_model_shards=1, n_fsdp_shards=1, rows=ROWS, **kwargs):
    """The warnings given by the first training step."""
    deployer = redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss, **kwargs)
    examples = list(np.random.default_rng(0).normal(size=(rows, T, D)).astype(np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(examples, max(1, rows // deployer.n_batch_shards))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("shards", "times", "total"), [((1, 8), 8, "7.9"), ((2, 2), 4, "4.0")])
@pytest.mark.sweep
def test_experts_over_all_tokens_are_reported_with_their_lines(shards, times, total):
    """Neither 5 experts nor 51 places divide."""
    (found,) = first_step_warnings(Experts(), loss_over_all_tokens, *shards)
    assert found == (
        f"`loss_fn`: expected each of 8 devices to compute 1/8 of a step, got {total} times that: the work of "
        f"{recorded_line('down')} ({times}.0 times); {recorded_line('up')} ({times}.0 times) is "
        f"repeated on several devices. Rows are gathered at {shortened(__file__)}:{LINES['place'] + 1}, as `cumsum` depends on their "
        f"order; at {recorded_line('scatter')}, as `scatter` looks them up by index. Work without rows of the batch, as after a "
        "sort, cumulative sum, scatter or lookup over all rows, is split only in matmuls, along a dim that divides over the "
        "devices. Pad that dim, or compute the work for each example, under `jax.vmap`."
    )


@pytest.mark.sweep
def test_experts_per_example_are_not_reported():
    assert first_step_warnings(Experts(), loss_per_example, 2, 2) == []


@pytest.mark.sweep
def test_experts_over_all_tokens_whose_buffers_divide_are_not_reported():
    assert first_step_warnings(Experts(64), loss_over_all_tokens, 1, 8) == []


def by_map(model, batch, key):
    return jnp.square(jax.lax.map(jax.vmap(model), batch)).mean()


def by_map_of_eight(model, batch, key):
    return jnp.square(jax.lax.map(lambda x: jax.vmap(model)(x), batch, batch_size=8)).mean()


def by_map_with_a_remainder(model, batch, key):
    return jnp.square(jax.lax.map(lambda x: jax.vmap(model)(x), batch, batch_size=5)).mean()


def by_python(model, batch, key):
    return sum(jnp.square(jax.vmap(model)(batch[i])).mean() for i in range(len(batch))) / len(batch)


def ragged(model, batch, key):
    return jnp.square(jax.lax.ragged_dot(batch[:, 0], model, jnp.full(4, len(batch) // 4))).mean()


def scattered(model, batch, key):
    places = jnp.cumsum(jnp.ones(len(batch), jnp.int32)) - 1
    return jnp.square(jax.vmap(model)(jnp.zeros_like(batch).at[places].set(batch))).mean()


WITHOUT_FILE = {"jax": jax, "jnp": jnp}
exec(
    """
def sorted_without_a_file(model, batch, key):
    return jnp.square(jax.vmap(model)(batch[jnp.argsort(batch[:, 0, 0])])).mean()
def by_map_without_a_file(model, batch, key):
    return jnp.square(jax.lax.map(lambda x: jax.vmap(model)(x), batch)).mean()
def by_batches_without_a_file(model, batch, key):
    return jnp.square(jax.lax.map(lambda x: jax.vmap(model)(x), batch, batch_size=5)).mean()
""",
    WITHOUT_FILE,
)


@pytest.fixture(autouse=True, scope="module")
def _all_frames():
    """Instructions of programs have the frames of their call, as for users."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", limit)


LOOP = "a loop takes one after the other"
PART = "`slice` takes some of them"


@pytest.mark.parametrize(
    "loss, times, why",
    [
        (by_map, "8.0", [LOOP]),
        pytest.param(by_map_of_eight, "8.0", [LOOP], marks=pytest.mark.sweep),
        (by_map_with_a_remainder, "7.6", [PART]),
        pytest.param(by_python, "8.0", [PART], marks=pytest.mark.sweep),
        (scattered, "8.0", ["`cumsum` depends on their order", "`scatter` looks them up by index"]),
        (WITHOUT_FILE["sorted_without_a_file"], "8.0", ["`sort` depends on their order", "`gather` looks them up by index"]),
        pytest.param(WITHOUT_FILE["by_map_without_a_file"], "8.0", [LOOP], marks=pytest.mark.sweep),
        pytest.param(WITHOUT_FILE["by_batches_without_a_file"], "7.6", [PART], marks=pytest.mark.sweep),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_gathered_rows_are_named_with_the_reason(loss, times, why):
    key = jax.random.key(0)
    is_conv = loss is scattered or loss.__name__.startswith("sorted")  # XLA's repeated convolutions are not split
    model = eqx.nn.Conv1d(T, F, 1, key=key) if is_conv else eqx.nn.MLP(D, D, F, 1, key=key)
    (found,) = first_step_warnings(model, loss, rows=64)
    assert f"compute 1/8 of a step, got {times} times that: " in found
    file = os.path.relpath(__file__)
    where = [
        part.rpartition(", as ")
        for part in found.partition("Rows are gathered at ")[2].split(". Work without")[0].split("; at ")
    ]
    assert [reason for _, _, reason in where] == why
    first = loss.__code__.co_firstlineno
    lines = [f"{file}:{n}" for n in (first + 1, first + 2)] if loss.__code__.co_filename == __file__ else ["an unknown line"]
    assert all(line in lines for line, _, _ in where)


def test_products_of_rows_in_groups_are_not_reported():
    """A CPU may multiply all rows with all groups."""
    assert first_step_warnings(jax.random.normal(jax.random.key(0), (4, D, F)), ragged, rows=64) == []


def test_rows_that_are_looked_up_without_repeated_work_are_not_reported():
    def loss(model, batch, key):
        return jnp.square(jax.vmap(jax.vmap(model))(batch)).mean() + 0 * jnp.sort(batch[:, 0, 0])[0]

    assert first_step_warnings(eqx.nn.MLP(D, D, F, 1, key=jax.random.key(0)), loss, 2, 2, rows=64) == []


def test_dense_jacobian_is_reported():
    """Implicit differentiation multiplies the weight by the identity, which has no batch rows to split."""
    (found,) = first_step_warnings({"w": 0.1 * jax.random.normal(jax.random.key(0), (D, D))}, fixed_point_loss, 1, 8)
    assert f"the work of {recorded_line('solve')} (" in found  # the call of the `custom_vjp`


@pytest.mark.sweep
def test_batches_computed_on_every_device_are_not_reported():
    assert first_step_warnings(Experts(), loss_over_all_tokens, rows=4) == []


@pytest.mark.sweep
def test_only_the_first_process_reports(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert first_step_warnings(Experts(), loss_over_all_tokens, 1, 8) == []


def test_step_is_compiled_once():
    client = jax.local_devices()[0].client

    def is_step(executable):
        return executable.hlo_modules()[0].name == "jit_step_fn"

    gc.collect()
    # Kept, since the program of an earlier test could be freed meanwhile.
    earlier = [each for each in client.live_executables() if is_step(each)]
    deployer = redeqx.Deployer(verbose=False)
    model = eqx.nn.Linear(3, 5, key=jax.random.key(0))
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=lambda m, x, k: jax.vmap(m)(x).sum()
    )
    trainer.train(list(np.ones((16, 3), np.float32)), 1)
    assert trainer.step == 2 and sum(map(is_step, client.live_executables())) == len(earlier) + 1


# --- counted FLOPs -----------------------------------------------------------------------------------------------------

# ruff: noqa: E501
PROGRAM = """\
HloModule jit_step, num_partitions=4

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0} constant({...})
  %dot.1 = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={source_file="/a.py" source_line=1}
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %dot.1)
}

%condition (p: (s32[], f32[8,16])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

%short (x: f32[8,16]) -> f32[8,8] {
  %x = f32[8,16]{1,0} parameter(0)
  %v = f32[16,8]{1,0} constant({...})
  ROOT %dot.2 = f32[8,8]{1,0} dot(%x, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={source_file="/a.py" source_line=2}
}

%long (x: f32[8,16]) -> f32[8,8] {
  %x = f32[8,16]{1,0} parameter(0)
  %v = f32[16,8]{1,0} constant({...})
  %cublas = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%x, %v), custom_call_target="__cublas$lt$matmul", metadata={source_file="/a.py" source_line=3}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %y = f32[8,8]{1,0} get-tuple-element(%cublas), index=0
  %u = f32[8,8]{1,0} constant({...})
  ROOT %dot.3 = f32[8,8]{1,0} dot(%y, %u), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={source_file="/a.py" source_line=3}
}

ENTRY %main (x: f32[8,16], image: f32[2,9,9,4], kernel: f32[3,3,4,6]) -> f32[8,8] {
  %x = f32[8,16]{1,0} parameter(0)
  %image = f32[2,9,9,4]{3,2,1,0} parameter(1)
  %kernel = f32[3,3,4,6]{3,2,1,0} parameter(2)
  %conv = f32[2,7,7,6]{3,2,1,0} convolution(%image, %kernel), window={size=3x3}, dim_labels=b01f_01io->b01f, metadata={source_file="/a.py" source_line=4}
  %init = (s32[], f32[8,16]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[8,16]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %cond = f32[8,8]{1,0} conditional(%which, %x, %x), branch_computations={%short, %long}
}
"""


def test_flops_counted_by_source_line():
    count = flops_by_line(Module.of(PROGRAM))
    dot, conv = 2 * 8 * 16 * 16, 2 * (2 * 7 * 7 * 6) * 3 * 3 * 4
    longer = 2 * 8 * 8 * 16 + 2 * 8 * 8 * 8
    assert count.all == {"/a.py:1": 3 * dot, "/a.py:3": longer, "/a.py:4": conv}
    assert count.once == {"/a.py:1": dot, "/a.py:3": longer, "/a.py:4": conv}


def test_a_batched_matmul_is_counted_in_the_form_of_a_tpu():
    """As compiled for TPU v5e: experts become a window whose entries are zeros but for one."""
    program = """\
HloModule jit_step, num_partitions=8

ENTRY %main (x: f32[2,40,16], w: f32[2,16,64]) -> f32[2,40,64] {
  %x = f32[2,40,16]{2,1,0} parameter(0)
  %w = f32[2,16,64]{2,1,0} parameter(1)
  ROOT %dot = f32[2,40,64]{2,1,0} convolution(%x, %w), window={size=2 stride=1 lhs_dilate=2}, dim_labels=0bf_0io->0bf, metadata={op_name="jit(step)/jvp(ecd,edf->ecf)/dot_general" source_file="/a.py" source_line=1}
}
"""
    matmul = 2 * 2 * 40 * 16 * 64
    assert flops_by_line(Module.of(program)).all == {"/a.py:1": matmul}
    of_conv = program.replace("dot_general", "conv_general_dilated")  # the gradient of one with strides, as in a trace
    assert flops_by_line(Module.of(of_conv)).all == {"/a.py:1": matmul}


@pytest.mark.parametrize(
    "result, lhs, rhs, target",
    [
        ("16,32,8,8", "16,4,16,16", "32,4,3,3", "BiasActivationForward"),
        ("16,4,16,16", "16,32,8,8", "32,4,3,3", "BackwardInput"),
        ("32,4,3,3", "16,4,16,16", "16,32,8,8", "BackwardFilter"),
    ],
)
def test_gradients_of_a_convolution_by_cudnn_count_as_much_as_itself(result, lhs, rhs, target):
    """As compiled for an A100: each with the labels and the window of the convolution, which has a stride of 2."""
    program = f"""\
HloModule jit_step, num_partitions=8

ENTRY %main (x: f32[{lhs}], w: f32[{rhs}]) -> f32[{result}] {{
  %x = f32[{lhs}]{{3,2,1,0}} parameter(0)
  %w = f32[{rhs}]{{3,2,1,0}} parameter(1)
  %conv = (f32[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %w), window={{size=3x3 stride=2x2 pad=1_1x1_1}}, dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$conv{target}", metadata={{op_name="jit(step)/conv" source_file="/a.py" source_line=1}}
  ROOT %y = f32[{result}]{{3,2,1,0}} get-tuple-element(%conv), index=0
}}
"""
    assert flops_by_line(Module.of(program)).all == {"/a.py:1": 2 * (16 * 32 * 8 * 8) * (4 * 3 * 3)}


def test_loop_of_unknown_length_is_counted_once():
    """The compiler may find a trip count that the trace does not have."""

    def step(w, x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    traced = jax.make_jaxpr(step)(jnp.zeros((16, 16)), jnp.zeros((32, 16)))
    line = f"{__file__}:{step.__code__.co_firstlineno + 1}"
    program = PROGRAM.replace(
        'source_file="/a.py" source_line=1', f'source_file="{__file__}" source_line={line[len(__file__) + 1 :]}'
    )
    assert excess(traced.jaxpr, Module.of(program), {line: 1.0}) is None
    replicated = program.replace("f32[8,16]", "f32[32,16]")
    assert excess(traced.jaxpr, Module.of(replicated), {line: 1.0}) == (4.0, [(line, 4.0)])
    assert excess(traced.jaxpr, Module.of(replicated), {line: 4.0}) is None  # the plan expects 4 times
    assert excess(traced.jaxpr, Module.of(replicated), {}) is None  # not a line of the loss


def test_notebook_lines_are_named_by_cell(monkeypatch):
    cells = {"/tmp/ipykernel_9/123.py": 2}
    compiler = SimpleNamespace(format_code_name=lambda name: ("Cell", f"In[{cells[name]}]") if name in cells else None)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert shortened("/tmp/ipykernel_9/123.py:5") == "In[2]:5"
    assert shortened(f"{os.getcwd()}/train.py:5") == "train.py:5"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert shortened("/tmp/ipykernel_9/123.py:5") == "/tmp/ipykernel_9/123.py:5"
