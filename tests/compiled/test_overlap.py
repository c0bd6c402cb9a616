"""Which share of a collective's bytes is sent behind matmuls: schedules written out, with rates that make times whole.

A product of 64 x 64 matrices takes one second, and a gather of one such matrix, in float32 on 8 devices, two.
"""

import pytest

from redeqx.compiled import Module, collectives, hidden_host_share, with_overlap

FLOPS, BYTES = 2 * 64**3, 64 * 64 * 4 * 7 / 8 / 2  # a second
DOT = "f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
START = "(f32[8,64]{1,0}, f32[64,64]{1,0}) all-gather-start(%shard), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
GATHER = "f32[64,64]{1,0} all-gather(%shard), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
PAIRS = '"intermediate_tensor_shape": {"dimensions": ["1", "1", "64", "64"]}'


def module_of(*lines, computations=""):
    """A program whose entry has these lines."""
    entry = "\n".join(f"  %{name} = {what}" for name, what in lines)
    return Module.of(
        f"HloModule step, is_scheduled=true, num_partitions=8\n\n{computations}\n"
        "ENTRY %main (p: f32[64,64], shard: f32[8,64]) -> f32[64,64] {\n"
        f"  %p = f32[64,64]{{1,0}} parameter(0)\n  %shard = f32[8,64]{{1,0}} parameter(1)\n{entry}\n}}\n"
    )


def shares(*lines, computations=""):
    """The share of each collective, by its name, in such a program."""
    module = module_of(*lines, computations=computations)
    found = with_overlap(collectives(module), module, FLOPS, lambda each: BYTES)
    return {each.instruction: each.hidden for each in found}


def done(name):
    return f"f32[64,64]{{1,0}} all-gather-done(%{name})"


@pytest.mark.parametrize("n_matmuls, share", [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.0)])
def test_matmuls_between_start_and_end_hide_bytes(n_matmuls, share):
    dots = [(f"dot.{i}", DOT) for i in range(n_matmuls)]
    assert shares(("before", DOT), ("g", START), *dots, ("d", done("g")), ("after", DOT)) == {"g": pytest.approx(share)}


def test_collectives_share_one_link_in_the_order_of_their_starts():
    dots = [(f"dot.{i}", DOT) for i in range(3)]
    found = shares(("a", START), ("b", START), *dots, ("d.a", done("a")), ("d.b", done("b")))
    assert found == {"a": pytest.approx(1.0), "b": pytest.approx(0.5)}
    # What is awaited first must wait for what has started before it.
    assert shares(("a", START), ("b", START), ("dot", DOT), ("d.b", done("b")), ("d.a", done("a"))) == {
        "a": pytest.approx(0.5),
        "b": pytest.approx(0.0),
    }


def test_a_synchronous_collective_is_not_hidden():
    assert shares(("dot.1", DOT), ("g", GATHER), ("dot.2", DOT)) == {"g": 0.0}


@pytest.mark.parametrize("mask, share", [("NO_MASK", 1.0), ("CAUSAL", 0.5)])
def test_kernels_of_attention_hide_bytes(mask, share):
    """Two products of 64 x 64 matrices, of which a causal mask needs half."""
    attention = '(f32[1,1,64,64]{3,2,1,0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"'
    kernel = f'{attention}, backend_config={{"cudnn_fmha_backend_config": {{{PAIRS}, "mask_type": "{mask}"}}}}'
    assert shares(("g", START), ("attention", kernel), ("d", done("g"))) == {"g": pytest.approx(share)}


@pytest.mark.parametrize("name, out", [("gmm", "64,64"), ("tgmm.1", "4,64,64")])
def test_kernels_of_grouped_matmuls_hide_bytes(name, out):
    """64 rows, each with the 64 x 64 matrix of one of four groups; or the gradient of the matrices."""
    sizes, matrices = "s32[9]{0} constant({...})", "f32[4,64,64]{2,1,0} constant({...})"
    kernel = f'f32[{out}]{{1,0}} custom-call(%sizes, %p, %matrices), custom_call_target="tpu_custom_call"'
    lines = [("sizes", sizes), ("matrices", matrices), ("g", START), (name, kernel), ("d", done("g"))]
    assert shares(*lines) == {"g": pytest.approx(0.5)}


@pytest.mark.parametrize("n_fusions, share", [(1, 0.0), (2, 0.5)])
def test_a_fusion_sends_all_before_it_ends_unless_others_take_part(n_fusions, share):
    """An asynchronous collective of libtpu is in each fusion that advances it, with the same channel."""
    called = "".join(
        f"%part.{i} (shard: f32[8,64]) -> f32[64,64] {{\n  %shard = f32[8,64]{{1,0}} parameter(0)\n"
        f"  ROOT %g.{i} = {GATHER}, channel_id=1\n}}\n"
        for i in range(n_fusions)
    )
    parts = [(f"f.{i}", f"f32[64,64]{{1,0}} fusion(%shard), kind=kCustom, calls=%part.{i}") for i in range(n_fusions)]
    found = shares(parts[0], ("dot", DOT), *parts[1:], computations=called)
    assert found == {"g.0": pytest.approx(share)}


def test_matmuls_hide_what_another_core_sends():
    """TPU7x calls a computation with the collective on its SparseCores, and goes on."""
    called = f"""%gather (shard: f32[8,64]) -> f32[64,64] {{
  %shard = f32[8,64]{{1,0}} parameter(0)
  ROOT %g = {GATHER}
}}
"""
    start = "((f32[8,64]{1,0}), f32[64,64]{1,0}, u32[]) call-start(%shard), to_apply=%gather"
    end = "f32[64,64]{1,0} call-done(%call)"
    assert shares(("call", start), ("dot", DOT), ("d", end), computations=called) == {"g": pytest.approx(0.5)}
    # libtpu 0.0.50 starts the call early, without operands, and sends when it has them.
    update = "((f32[8,64]{1,0}), f32[64,64]{1,0}) call-update(%call, %shard)"
    lines = [("call", start.replace("(%shard)", "()")), ("before", DOT), ("u", update)]
    for n_matmuls, share in ((0, 0.0), (1, 0.5), (2, 1.0)):
        dots = [(f"later.{i}", DOT) for i in range(n_matmuls)]
        found = shares(*lines, *dots, ("d", "f32[64,64]{1,0} call-done(%u)"), ("after", DOT), computations=called)
        assert found == {"g": pytest.approx(share)}


COPIED = """
%copied (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  ROOT %moved = f32[64,64]{1,0:S(5)} copy(%x)
}
"""


@pytest.mark.parametrize(
    "start, end",
    [
        ("(f32[64,64]{1,0:S(5)}, f32[64,64]{1,0}, u32[]) copy-start(%p)", "copy-done(%copy-start)"),
        # Of GPUs since JAX 0.12.
        (
            "((f32[64,64]{1,0}), f32[64,64]{1,0:S(5)}, u32[]) fusion-start(%p), kind=kLoop, calls=%copied",
            "fusion-done(%copy-start)",
        ),
    ],
)
@pytest.mark.parametrize("n_matmuls, share", [(0, 0.0), (1, 0.25), (2, 0.5)])
def test_matmuls_hide_copies_to_the_host(n_matmuls, share, start, end):
    """Two copies of two seconds each, the second of which is awaited at once."""
    dots = [(f"dot.{i}", DOT) for i in range(n_matmuls)]
    lines = [("copy-start", start), *dots, ("copy-done", f"f32[64,64]{{1,0:S(5)}} {end}")]
    module = module_of(*lines, ("back", "f32[64,64]{1,0} copy(%copy-done)"), ("after", DOT), computations=COPIED)
    assert hidden_host_share(module, FLOPS, 64 * 64 * 4 / 2) == pytest.approx(share)
    assert hidden_host_share(module_of(("dot", DOT)), FLOPS, 1.0) is None


def test_loops_hide_bytes_in_each_iteration_and_as_a_whole():
    body = f"""%body (state: (s32[], f32[64,64], f32[8,64])) -> (s32[], f32[64,64], f32[8,64]) {{
  %state = (s32[], f32[64,64]{{1,0}}, f32[8,64]{{1,0}}) parameter(0)
  %p = f32[64,64]{{1,0}} get-tuple-element(%state), index=1
  %shard = f32[8,64]{{1,0}} get-tuple-element(%state), index=2
  %inner = {START}
  %dot = {DOT}
  %end = {done("inner")}
  ROOT %next = (s32[], f32[64,64]{{1,0}}, f32[8,64]{{1,0}}) tuple(%state, %dot, %shard)
}}

%condition (state: (s32[], f32[64,64], f32[8,64])) -> pred[] {{
  %state = (s32[], f32[64,64]{{1,0}}, f32[8,64]{{1,0}}) parameter(0)
  ROOT %less = pred[] constant(true)
}}
"""
    twice = 'backend_config={"known_trip_count":{"n":"2"}}'
    loop = f"(s32[], f32[64,64]{{1,0}}, f32[8,64]{{1,0}}) while(%state), condition=%condition, body=%body, {twice}"
    found = shares(("outer", START), ("loop", loop), ("d", done("outer")), computations=body)
    assert found == {"outer": pytest.approx(1.0), "inner": pytest.approx(0.5)}


@pytest.mark.parametrize("scopes, share", [("redeqx_about_3/while", 1.0), ("redeqx_about_3/while/body/while", 0.5)])
def test_a_loop_of_unknown_length_hides_as_much_as_it_is_expected_to(scopes, share):
    """As that over the tiles of a grouped matmul. The loops inside it are others."""
    computations = f"""%body (p: f32[64,64]) -> f32[64,64] {{
  %p = f32[64,64]{{1,0}} parameter(0)
  ROOT %dot = {DOT}
}}

%condition (p: f32[64,64]) -> pred[] {{
  %p = f32[64,64]{{1,0}} parameter(0)
  ROOT %less = pred[] constant(true)
}}
"""
    loop = f'f32[64,64]{{1,0}} while(%p), condition=%condition, body=%body, metadata={{op_name="jit(step)/{scopes}"}}'
    assert shares(("g", START), ("loop", loop), ("d", done("g")), computations=computations) == {"g": pytest.approx(share)}


def test_a_computation_with_two_callers_hides_as_much_in_each():
    inner = (
        "%inner (p: f32[64,64], shard: f32[8,64]) -> f32[64,64] {\n"
        f"  %p = f32[64,64]{{1,0}} parameter(0)\n  %shard = f32[8,64]{{1,0}} parameter(1)\n  %g = {START}\n"
        f"  %dot = {DOT}\n  ROOT %d = {done('g')}\n}}\n"
    )
    call = "f32[64,64]{1,0} call(%p, %shard), to_apply=%inner"
    for calls in ([("c", call)], [("c.1", call), ("c.2", call)]):
        module = module_of(*calls, computations=inner)
        (found,) = with_overlap(collectives(module), module, FLOPS, lambda each: BYTES)
        assert (found.n_executions, found.moved, found.hidden) == (len(calls), len(calls) * 2 * BYTES, pytest.approx(0.5))


def test_a_choice_that_is_rarely_taken_sends_nothing():
    branches = f"""%sends (p: f32[8,64]) -> f32[64,64] {{
  %shard = f32[8,64]{{1,0}} parameter(0)
  ROOT %g = {GATHER}
}}

%not (p: f32[8,64]) -> f32[64,64] {{
  %q = f32[8,64]{{1,0}} parameter(0)
  ROOT %zeros = f32[64,64]{{1,0}} broadcast(%q)
}}
"""
    made = "f32[64,64]{1,0} conditional(%i, %shard, %shard), branch_computations={%not, %sends}"
    found = {
        scope: shares(("choice", f'{made}, metadata={{op_name="jit(step)/{scope}/cond"}}'), computations=branches)
        for scope in ("redeqx_rarely", "often")
    }
    assert found == {"redeqx_rarely": {}, "often": {"g": 0.0}}
