"""The HLO parser: literal programs in each notation, and one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from redeqx.compiled import Collective, Module, collectives
from redeqx.machine import make_mesh

_MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{computations}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
{entry}
}}
"""


def _module(entry, computations=""):
    return _MODULE.format(entry=entry, computations=computations)


@pytest.mark.parametrize(
    "groups, first",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", (0, 1)),
        ("{}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", (0, 2, 4, 6)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", (0, 1, 4, 5)),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", (0, 1, 2, 3)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", (0, 4)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", (0, 1, 2, 3)),
        ("mesh[data=2,model=4], device_ids=([0,2,4,6,1,3,5,7]) {model}", (0, 2, 4, 6)),
    ],
)
def test_replica_groups_in_every_notation(groups, first):
    text = _module(
        f"  ROOT %ar = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}'
    )
    (found,) = collectives(Module.of(text))
    assert found == Collective(
        kind="all-reduce",
        shape=(4, 8),
        dtype="f32",
        bytes=128,
        group=first,
        n_executions=1,
        op_name="jit(step)/transpose(jvp())/dot_general",
        instruction="ar",
    )
    assert found.moved == 2 * (len(first) - 1) / len(first) * 128
    assert found.is_backward


def test_permute_group_is_the_first_exchanged_pair():
    text = _module("  ROOT %cp = f32[4,8]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}")
    assert [(c.group, c.pairs) for c in collectives(Module.of(text))] == [((1, 2), ((1, 2), (2, 1)))]


def test_permute_spans_the_axes_of_all_its_pairs():
    text = _module("  ROOT %cp = f32[4,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,4},{4,5},{5,0}}")
    (found,) = collectives(Module.of(text))
    assert found.axes(Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "model"))) == ("data", "model")


def test_unknown_notation_of_replica_groups_is_an_error():
    text = _module("  ROOT %ar = f32[4,8]{1,0} all-reduce(%p), replica_groups=<new>, to_apply=%add")
    with pytest.raises(
        ValueError, match=r"`replica_groups`: expected a list, .* got `replica_groups=<new>,`. Please report"
    ):
        collectives(Module.of(text))


def test_text_without_entry_is_an_error():
    with pytest.raises(ValueError, match=r"`hlo_text`: expected an ENTRY computation, got none. Pass"):
        Module.of("HloModule empty")


def test_asynchronous_collectives_are_counted_once_by_their_result():
    text = _module(
        """  %ags = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %agd = f32[32,8]{1,0} all-gather-done(%ags)
  %ars = (f32[4,8]{1,0}, bf16[6]{0:T(8,128)(2,1)S(1)}) all-reduce-start(%p, %q), replica_groups={{0,1}}, to_apply=%add
  %ard = (f32[4,8]{1,0}, bf16[6]{0}) all-reduce-done(%ars)
  %cps = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[4,8]{1,0} collective-permute-done(%cps)
  %rss = ((f32[4,8]{1,0}), f32[4,2]{1,0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8], dimensions={1}
  %rsd = f32[4,2]{1,0} reduce-scatter-done(%rss)
  %as = ((f32[4,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%p), calls=%wrapped
  ROOT %ad = f32[4,8]{1,0} async-done(%as)""",
        """%wrapped (q: f32[4,8]) -> f32[4,8] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %a2a = f32[4,8]{1,0} all-to-all(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}""",
    )
    found = [(c.kind, c.shape, c.dtype, c.bytes, c.group_size, c.moved) for c in collectives(Module.of(text))]
    assert found == [
        ("all-gather", (32, 8), "f32", 1024, 8, 896),
        ("all-reduce", (4, 8), "f32", 128, 2, 128),
        ("all-reduce", (6,), "bf16", 12, 2, 12),
        ("collective-permute", (4, 8), "f32", 128, 2, 128),
        ("reduce-scatter", (4, 8), "f32", 128, 4, 96),
        ("all-to-all", (4, 8), "f32", 128, 4, 96),
    ]


def test_collectives_of_two_loops_with_one_channel_are_both_counted():
    """As those of `jax.shard_map` in the forward and the backward pass."""
    text = _module(
        """  %a = f32[4,8]{1,0} call(%p), to_apply=%forward
  ROOT %b = f32[4,8]{1,0} call(%a), to_apply=%backward""",
        "".join(
            f"%{name} (q: f32[4,8]) -> f32[4,8] {{\n  %q = f32[4,8]{{1,0}} parameter(0)\n"
            "  ROOT %x = f32[4,8]{1,0} all-to-all(%q), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}\n}\n"
            for name in ("forward", "backward")
        ),
    )
    assert len(collectives(Module.of(text))) == 2


def test_instructions_after_a_tpu_kernel_are_read():
    """Its attributes span lines, the last of which begins like the end of a computation."""
    text = _module(
        """  %k = f32[4,8]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/pallas_call"}
  ROOT %ar = f32[4,8]{1,0} all-reduce(%k), channel_id=1, replica_groups={}, to_apply=%add""",
    )
    module = Module.of(text)
    assert [each.kind for each in collectives(module)] == ["all-reduce"]
    assert [line.op_name for line in module.computations[module.entry] if line.name == "k"] == ["jit(f)/pallas_call"]


def test_tpu_collective_fused_into_several_operations_is_counted_once():
    """Every fusion that takes part in an asynchronous collective contains its text, with the same channel. Where the text
    has no name, the first fusion's is taken.
    """
    gather = "%ag = f32[32,8]{1,0} all-gather(%q), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}"
    scatter = "%ar = f32[4,8]{1,0} all-reduce(%q), channel_id=8, replica_groups={}, to_apply=%add"
    text = _module(
        """  %a = f32[32,8]{1,0} fusion(%p), kind=kCustom, calls=%started, metadata={op_name="gathered"}
  %b = f32[32,8]{1,0} fusion(%p), kind=kCustom, calls=%driven
  ROOT %c = f32[4,1]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3, metadata={op_name="summed"}""",
        "".join(
            f"%{name} (q: f32[4,8]) -> f32[4,8] {{\n  %q = f32[4,8]{{1,0}} parameter(0)\n  ROOT {line}\n}}\n"
            for name, line in (("started", gather), ("driven", gather), ("all-reduce-scatter.3", scatter))
        ),
    )
    found = [(c.kind, c.bytes, c.n_executions, c.op_name) for c in collectives(Module.of(text))]
    assert found == [("all-gather", 1024, 1, "gathered"), ("reduce-scatter", 128, 1, "summed")]


HEAD = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "/home/me/train.py"
2 "/site/model.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=2 function_name_id=1 line=30 end_line=31 column=8 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


"""


def test_source_lines_start_with_the_innermost():
    entry = """ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %a = f32[4,8]{1,0} all-reduce(%p), replica_groups={}, metadata={op_name="x" stack_frame_id=2}
  %b = f32[4,8]{1,0} all-reduce(%p), replica_groups={}, metadata={op_name="x" source_file="old.py" source_line=3}
  ROOT %c = f32[4,8]{1,0} all-reduce(%p), replica_groups={}
}
"""
    sources = [c.source for c in collectives(Module.of(HEAD + entry))]
    assert sources == [("/site/model.py:30", "/home/me/train.py:7"), ("old.py:3",), ()]


def test_loops_multiply_executions_and_unknown_trip_counts_are_marked():
    body = """%{name} (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {{
  %s = (s32[], f32[4,8]{{1,0}}) parameter(0)
  {inside}
  ROOT %t = (s32[], f32[4,8]{{1,0}}) tuple(%i, %x)
}}
"""
    reduce = "%r = f32[] all-reduce(%v), replica_groups={}, to_apply=%add"
    counted = 'condition=%cond, body=%{}, backend_config={{"known_trip_count":{{"n":"{}"}}}}'.format
    inner = f"%w = (s32[], f32[4,8]{{1,0}}) while(%s), {counted('inner', 3)}"
    text = _module(
        f"  %a = (s32[], /*index=1*/f32[4,8]{{1,0}}) while(%t), {counted('outer', 5)}\n"
        "  ROOT %b = (s32[], f32[4,8]{1,0}) while(%t), condition=%cond, body=%unknown",
        body.format(name="inner", inside=reduce)
        + body.format(name="outer", inside=inner)
        + body.format(name="unknown", inside=reduce),
    )
    assert [(c.n_executions, c.exact, c.bytes) for c in collectives(Module.of(text))] == [(15, True, 4), (1, False, 4)]


@pytest.mark.parametrize(
    ("kind", "condition", "n"),
    [
        ("s32[]", "ROOT %less = pred[] compare(%x, %limit), direction=LT", 12),
        ("f32[]", "ROOT %less = pred[] compare(%x, %limit), direction=LT", None),  # a threshold, not a count
        ("s32[]", "%y = s32[] negate(%x)\n  ROOT %less = pred[] compare(%y, %limit), direction=LT", None),
        ("s32[]", "%less = pred[] compare(%x, %limit), direction=LT\n  ROOT %and = pred[] and(%less, %done)", None),
    ],
)
def test_trip_count_from_the_condition_of_a_loop(kind, condition, n):
    text = _module(
        f"  ROOT %w = ({kind}) while(%t), condition=%cond, body=%body",
        f"""%cond (s: ({kind})) -> pred[] {{
  %s = ({kind}) parameter(0)
  %limit = {kind} constant(12)
  %x = {kind} get-tuple-element(%s), index=0
  {condition}
}}
""",
    )
    module = Module.of(text)
    loop = module.computations[module.entry][-1]
    assert loop.trip_count == n


def test_trip_count_of_a_loop_whose_counter_starts_at_one():
    """As libtpu compiles a loop over layers whose first iteration it computes before the loop."""
    text = _module(
        "  %one = s32[] constant(1)\n  %start = s32[] copy(%one)\n  %t = (f32[], s32[]) tuple(%x, %start)\n"
        "  ROOT %w = (f32[], s32[]) while(%t), condition=%cond, body=%body",
        """%cond (s: (f32[], s32[])) -> pred[] {
  %s = (f32[], s32[]) parameter(0)
  %limit = s32[] constant(4)
  %x = s32[] get-tuple-element(%s), index=1
  ROOT %less = pred[] compare(%x, %limit), direction=LT
}
""",
    )
    module = Module.of(text)
    assert module.computations[module.entry][-1].trip_count == 3


def test_trip_count_from_a_condition_that_is_a_fusion():
    """As JAX 0.12 compiles, for GPUs, a loop of micro-batches whose collectives XLA moves."""
    text = _module(
        "  ROOT %w = (s32[]) while(%t), condition=%cond, body=%body",
        """%less (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(15)
  ROOT %compare = pred[] compare(%p, %limit), direction=LT
}
%cond (s: (s32[])) -> pred[] {
  %s = (s32[]) parameter(0)
  %x = s32[] get-tuple-element(%s), index=0
  ROOT %fusion = pred[] fusion(%x), kind=kLoop, calls=%less
}
""",
    )
    module = Module.of(text)
    assert module.computations[module.entry][-1].trip_count == 15


def test_collectives_of_a_compiled_step():
    """A column and a row split in a scan of 6, data=2 x fsdp=2 x model=2: no collective beyond the required ones."""
    mesh = make_mesh(n_model_shards=2, n_fsdp_shards=2)

    def sharding(*spec):
        return NamedSharding(mesh, P(*spec))

    def loss(weights, x):
        @jax.checkpoint
        def block(x, layer):
            up = jax.lax.with_sharding_constraint(layer[0], sharding(None, "model"))
            down = jax.lax.with_sharding_constraint(layer[1], sharding("model", None))
            return x + jax.nn.gelu(x @ up) @ down, None

        return jnp.mean(jax.lax.scan(block, x, weights)[0] ** 2)

    shapes = (jax.ShapeDtypeStruct((6, 64, 256), jnp.float32), jax.ShapeDtypeStruct((6, 256, 64), jnp.float32))
    shardings = (sharding(None, "fsdp", "model"), sharding(None, "model", "fsdp"))
    step = jax.jit(jax.grad(loss), in_shardings=(shardings, sharding(("data", "fsdp"))), out_shardings=shardings)
    compiled = step.lower(shapes, jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)).compile()
    found = [c for c in collectives(Module.of(compiled.as_text())) if c.bytes > 4]
    assert all(c.exact and c.n_executions == 6 for c in found)

    gathers = [c for c in found if c.kind == "all-gather"]
    assert sorted(c.is_backward for c in gathers) == [False, False, True, True]
    assert {c.bytes for c in gathers} == {64 * 128 * 4} and {c.group_size for c in gathers} == {2}

    activations = [c for c in found if 16 in c.shape]  # one all-reduce a pass, over the model axis
    assert [(c.kind, c.shape, c.group_size) for c in activations] == [("all-reduce", (2, 16, 64), 2)] * 2
