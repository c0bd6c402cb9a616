"""Buffers of a step at its memory peak, and the bytes it moves: on literal programs, and compared with the compiler."""

import jax
import jax.numpy as jnp
import pytest

from redeqx.compiled import Module, bytes_moved, host_copies, temporaries, workspace_allowance

KIB = 2**10


def module(entry, computations="", head=""):
    return Module.of(
        f"HloModule jit_step, is_scheduled=true{head}\n\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"
    )


def temporary_buffers(text, computations="", head=""):
    return [(buffer.bytes, buffer.op_name) for buffer in temporaries(module(text, computations, head))]


def op_name(name):
    return f'metadata={{op_name="{name}"}}'


def test_buffers_live_from_creation_to_last_use():
    found = temporary_buffers(f"""  %p = f32[256]{{0}} parameter(0)
  %a = f32[512]{{0}} dot(%p, %p), {op_name("a")}
  %b = f32[1024]{{0}} dot(%a, %p), {op_name("b")}
  %c = f32[256]{{0}} dot(%b, %p), {op_name("c")}
  %d = f32[2048]{{0}} dot(%c, %p), {op_name("d")}
  ROOT %e = f32[] dot(%d, %p), {op_name("e")}""")
    # At the peak, when d is computed, a and b are freed and e does not exist yet.
    assert found == [(8 * KIB, "d"), (KIB, "c")]


def test_elementwise_operation_reuses_the_buffer_of_its_operand():
    text = """  %p = f32[1024]{{0}} parameter(0)
  %a = f32[1024]{{0}} dot(%p, %p), {a}
  %b = f32[1024]{{0}} {op}, {b}
  ROOT %c = f32[] dot(%b, %p)"""
    in_place = temporary_buffers(text.format(a=op_name("a"), b=op_name("b"), op="add(%a, %a)"))
    beside = temporary_buffers(text.format(a=op_name("a"), b=op_name("b"), op="dot(%a, %a)"))
    assert beside == [(4 * KIB, "a"), (4 * KIB, "b")]
    assert in_place == [(4 * KIB, "b"), (4, "")]


def test_views_and_tuples_allocate_nothing():
    found = temporary_buffers(f"""  %p = f32[256]{{0}} parameter(0)
  %a = f32[1024]{{0}} dot(%p, %p), {op_name("a")}
  %v = f32[32,32]{{1,0}} bitcast(%a)
  %t = (f32[32,32]{{1,0}}, f32[256]{{0}}) tuple(%v, %p)
  %g = f32[32,32]{{1,0}} get-tuple-element(%t), index=0
  %b = f32[512]{{0}} dot(%g, %p), {op_name("b")}
  ROOT %c = f32[] dot(%b, %p)""")
    assert found == [(4 * KIB, "a"), (2 * KIB, "b")]


def test_output_aliased_to_an_argument_is_not_counted():
    text = f"""  %p = f32[1024]{{0}} parameter(0)
  %a = f32[1024]{{0}} dot(%p, %p), {op_name("new parameters")}
  %b = f32[512]{{0}} dot(%p, %p), {op_name("metrics")}
  ROOT %t = (f32[1024]{{0}}, f32[512]{{0}}) tuple(%a, %b)"""
    assert temporary_buffers(text) == [(4 * KIB, "new parameters"), (2 * KIB, "metrics")]
    assert temporary_buffers(text, head=", input_output_alias={ {0}: (0, {}, may-alias) }, x={}") == [(2 * KIB, "metrics")]


BODY = f"""%body (s: (s32[], f32[8,256], f32[256])) -> (s32[], f32[8,256], f32[256]) {{
  %s = (s32[], f32[8,256]{{1,0}}, f32[256]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[8,256]{{1,0}} get-tuple-element(%s), index=1
  %x = f32[256]{{0}} get-tuple-element(%s), index=2
  %wide = f32[1024]{{0}} dot(%x, %x), {op_name("inside")}
  %y = f32[1,256]{{1,0}} dot(%wide, %x), {op_name("saved by the loop")}
  %new = f32[8,256]{{1,0}} dynamic-update-slice(%stack, %y, %i, %i)
  %z = f32[256]{{0}} bitcast(%y)
  ROOT %t = (s32[], f32[8,256]{{1,0}}, f32[256]{{0}}) tuple(%i, %new, %z)
}}
%cond (s: (s32[], f32[8,256], f32[256])) -> pred[] {{
  %s2 = (s32[], f32[8,256]{{1,0}}, f32[256]{{0}}) parameter(0)
  %i2 = s32[] get-tuple-element(%s2), index=0
  %n = s32[] constant(8)
  ROOT %lt = pred[] compare(%i2, %n), direction=LT
}}
"""
LOOP = f"""  %p = f32[256]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %zeros = f32[8,256]{{1,0}} broadcast(%zero), {op_name("zeros")}
  %t0 = (s32[], f32[8,256]{{1,0}}, f32[256]{{0}}) tuple(%zero, %zeros, %p)
  %w = (s32[], f32[8,256]{{1,0}}, f32[256]{{0}}) while(%t0), condition=%cond, body=%body
  %out = f32[8,256]{{1,0}} get-tuple-element(%w), index=1
  ROOT %r = f32[] dot(%out, %p)"""


def test_array_filled_by_a_loop_is_named_after_the_operation_that_fills_it():
    assert temporary_buffers(LOOP, BODY) == [(8 * KIB, "saved by the loop"), (4 * KIB, "inside"), (KIB, "saved by the loop")]


def test_loop_traffic_is_multiplied_by_the_trip_count():
    parsed = module(LOOP, BODY)
    (loop,) = [line for line in parsed.computations["main"] if line.opcode == "while"]
    assert loop.trip_count == 8
    # %wide reads x twice; %y reads %wide and x; both are written. Of the stack, a row and two indices are read and written.
    iteration = (KIB + KIB + 4 * KIB) + (4 * KIB + KIB + KIB) + 2 * (KIB + 4 + 4)
    condition = 4 + 4 + 1
    assert bytes_moved(parsed) == 8 * (iteration + condition) + (4 + 8 * KIB) + (8 * KIB + KIB + 4)


def test_a_loop_of_unknown_length_moves_as_much_as_it_is_expected_to():
    """As that over the tiles of a grouped matmul, each of which reads its matrix."""
    unknown, named = BODY.replace("direction=LT", "direction=NE"), f"body=%body, {op_name('redeqx_about_8/while')}"
    once, tiles = module(LOOP, unknown), module(LOOP.replace("body=%body", named), unknown)
    assert bytes_moved(once) < bytes_moved(tiles) == bytes_moved(module(LOOP, BODY))


BRANCHES = """%less (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  ROOT %x = f32[256]{0} dot(%a, %a)
}
%more (b: f32[256]) -> f32[256] {
  %b = f32[256]{0} parameter(0)
  %y = f32[1024]{0} dot(%b, %b)
  ROOT %z = f32[256]{0} dot(%y, %b)
}
"""


@pytest.mark.parametrize("branches", ["%less, %more", "%more, %less"])
def test_traffic_of_a_conditional_is_that_of_its_largest_branch(branches):
    entry = f"""  %p = f32[256]{{0}} parameter(0)
  %i0 = s32[] parameter(1)
  ROOT %c = f32[256]{{0}} conditional(%i0, %p, %p), branch_computations={{{branches}}}"""
    assert bytes_moved(module(entry, BRANCHES)) == (KIB + KIB + 4 * KIB) + (4 * KIB + KIB + KIB)


def test_what_a_choice_returns_is_made_once():
    """By the branch, whose array has the choice's place in memory."""
    entry = f"""  %p = f32[256]{{0}} parameter(0)
  %i0 = s32[] parameter(1)
  %c = f32[1024]{{0}} conditional(%i0, %p, %p), branch_computations={{%small, %large}}, {op_name("chosen")}
  ROOT %d = f32[1024]{{0}} dot(%c, %p)"""
    branches = BRANCHES.replace("%less", "%small").replace("%more", "%large").replace("f32[256]{0} dot", "f32[1024]{0} dot")
    assert [n_bytes for n_bytes, _ in temporary_buffers(entry, branches)] == [4 * KIB, 4 * KIB]
    passing = "%small (a: f32[1024]) -> f32[1024] {\n  ROOT %a = f32[1024]{0} parameter(0)\n}\n"
    entry = entry.replace("%large", "%small").replace("f32[256]", "f32[1024]")
    assert temporary_buffers(entry, passing)[0] == (4 * KIB, "chosen")


def test_numbers_of_4_bits_fill_whole_bytes():
    entry = """  %p = s8[3]{0} parameter(0)
  %a = s4[3]{0} convert(%p)
  ROOT %b = s8[3]{0} convert(%a)"""
    assert bytes_moved(module(entry)) == (3 + 2) + (2 + 3)


@pytest.mark.parametrize(
    "start, moved",
    [
        ("(f32[8,256]{1,0:S(1)}, f32[8,256]{1,0}, u32[]{:S(2)}) copy-start(%p)", 8 * KIB + 8 * KIB),
        ("(f32[8,256]{1,0:T(8,128)S(1)}, f32[8,256]{1,0}, u32[]{:S(2)}) copy-start(%p)", 8 * KIB),
        ("((f32[8,256]{1,0}), f32[1,256]{1,0:T(1,128)}, s32[]{:S(2)}) slice-start(%p), slice={[0:1], [0:256]}", 2 * KIB),
        ("((f32[8,256]{1,0}), f32[1,256]{1,0:T(1,128)S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:1], [0:256]}", KIB),
        ("(f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8]", 8 * KIB + 64 * KIB),
        ("f32[8,256]{1,0} all-reduce-start(%p), replica_groups={}", 8 * KIB + 8 * KIB),
        ("(f32[8,256]{1,0}, f32[8,256]{1,0}, u32[]{:T(128)S(2)}, u32[]) collective-permute-start(%p)", 8 * KIB + 8 * KIB),
        ("((f32[8,256]{1,0}), f32[64,256]{1,0}) call-update(%ready, %p)", 8 * KIB + 64 * KIB),
    ],
)
def test_an_operation_that_runs_beside_others_reads_its_operand_once(start, moved):
    """The type of its start has the operand too. A slice into a TPU's on-chip memory is read, but not written."""
    entry = f"""  %p = f32[8,256]{{1,0}} parameter(0)
  %ready = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), async_execution_thread="sparsecore"
  %s = {start}
  ROOT %d = f32[64,256]{{1,0}} async-done(%s)"""
    assert bytes_moved(module(entry)) == moved


def test_what_sparse_cores_send_has_the_memory_of_its_result():
    found = temporary_buffers(f"""  %p = f32[256]{{0}} parameter(0)
  %ready = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), async_execution_thread="sparsecore"
  %sent = ((f32[256]{{0}}), f32[2048]{{0}}) call-update(%ready, %p), {op_name("gathered")}
  %g = f32[2048]{{0}} call-done(%sent)
  %a = f32[512]{{0}} dot(%p, %p), {op_name("a")}
  ROOT %d = f32[] dot(%g, %a)""")
    assert found == [(8 * KIB, "gathered"), (2 * KIB, "a"), (4, "")]


FUSED = """%fused (a: f32[8,256], i: s32[]) -> f32[256] {{
  %a = f32[8,256]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,256]{{1,0}} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{1,256}}
  ROOT %r = f32[256]{{0}} {root}
}}
"""


SLICED = """  %p = f32[8,256]{1,0} parameter(0)
  %i0 = s32[] parameter(1)
  ROOT %f = f32[256]{0} fusion(%p, %i0), kind=kLoop, calls=%fused"""


@pytest.mark.parametrize("root, read", [("bitcast(%row)", KIB), ("dot(%row, %a)", 8 * KIB)])
def test_fusion_that_slices_an_operand_reads_only_the_slice(root, read):
    assert bytes_moved(module(SLICED, FUSED.format(root=root))) == read + 4 + KIB


@pytest.mark.parametrize("in_place, read", [(", output_to_operand_aliasing={{}: (0, {})}", KIB), ("", 8 * KIB)])
def test_tpu_fusion_that_slices_an_operand_by_other_tiles_reads_only_the_slice(in_place, read):
    tiled = """%tiled (a: f32[8,256]) -> f32[8,256] {
  %a = f32[8,256]{1,0:T(16,128)} parameter(0)
  ROOT %c = f32[8,256]{1,0:T(8,128)} copy(%a)
}
"""
    fused = FUSED.format(root="bitcast(%row)").replace("dynamic-slice(%a", "dynamic-slice(%t")
    inner = f"  %t = f32[8,256]{{1,0:T(8,128)}} fusion(%a), kind=kLoop{in_place}, calls=%tiled\n  %row"
    assert bytes_moved(module(SLICED, tiled + fused.replace("  %row", inner, 1))) == read + 4 + KIB


@pytest.mark.parametrize("memory", ["", ":T(1,128)S(1)"])
def test_fusion_that_updates_two_operands_writes_only_the_updates(memory):
    """As where a loop over layers saves several values. An update that is on the chip is written too."""
    updates = f"""%updates (a: f32[8,256], b: f32[8,256], x: f32[1,256], i: s32[]) -> (f32[8,256], f32[8,256], f32[512]) {{
  %a = f32[8,256]{{1,0}} parameter(0)
  %b = f32[8,256]{{1,0}} parameter(1)
  %x = f32[1,256]{{1,0{memory}}} parameter(2)
  %i = s32[] parameter(3)
  %c = f32[8,256]{{1,0}} dynamic-update-slice(%a, %x, %i, %i)
  %d = f32[8,256]{{1,0}} dynamic-update-slice(%b, %x, %i, %i)
  %w = f32[512]{{0}} dot(%x, %x)
  ROOT %t = (f32[8,256]{{1,0}}, f32[8,256]{{1,0}}, f32[512]{{0}}) tuple(%c, %d, %w)
}}
"""
    entry = f"""  %p = f32[8,256]{{1,0}} parameter(0)
  %q = f32[8,256]{{1,0}} parameter(1)
  %x0 = f32[1,256]{{1,0{memory}}} parameter(2)
  %i0 = s32[] parameter(3)
  ROOT %f = (f32[8,256]{{1,0}}, f32[8,256]{{1,0}}, f32[512]{{0}}) fusion(%p, %q, %x0, %i0), kind=kLoop, calls=%updates"""
    read = 4 + (0 if memory else KIB)
    assert bytes_moved(module(entry, updates)) == read + KIB + KIB + 2 * KIB


CALLS = """  %p = bf16[64,32]{1,0} parameter(0)
  %a = (bf16[64,64]{1,0}, s8[33554432]{0}) custom-call(%p, %p), custom_call_target="__cublas$lt$matmul"
  %b = bf16[64,64]{1,0} get-tuple-element(%a), index=0
  %c = (bf16[64,64]{1,0}, bf16[64,32]{1,0}, bf16[64,32]{1,0}, u8[WORK]{0}) custom-call(%b), custom_call_target="TARGET"
  %d = bf16[64,64]{1,0} get-tuple-element(%c), index=0
  ROOT %e = f32[] dot(%d, %p)"""


@pytest.mark.parametrize("work", [0, 4096])
def test_library_workspaces_take_memory_but_no_traffic(work):
    """cuDNN chooses its workspaces on the GPU. Where their size is unknown, an allowance is added."""
    own, narrow = 2 * 64 * 64, 2 * 64 * 32
    parsed = module(CALLS.replace("TARGET", "__cudnn$fmhaSoftmaxBackward").replace("WORK", str(work)))
    assert bytes_moved(parsed) == (2 * narrow + own) + (own + own + 2 * narrow) + (own + narrow + 4)
    assert max(buffer.bytes for buffer in temporaries(parsed)) == 33554432
    assert workspace_allowance(parsed) == (0 if work else 3 * 4 * 64 * 64)
    other = module(CALLS.replace("TARGET", "mine").replace("WORK", "4096"))  # not a library's workspace but a result
    assert bytes_moved(other) == bytes_moved(parsed) + 4096 and workspace_allowance(other) == 0


TO_HOST = """%body (s: (s32[], f32[8,256])) -> (s32[], f32[8,256]) {
  %s = (s32[], f32[8,256]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[8,256]{1,0:S(5)} get-tuple-element(%s), index=1
  %y = f32[1,256]{1,0} broadcast(%i)
  %u = ((f32[8,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[]), f32[8,256]{1,0:S(5)}, u32[]) fusion-start(%stack, %y, %i), calls=%f
  %v = f32[8,256]{1,0:S(5)} fusion-done(%u)
  ROOT %t = (s32[], f32[8,256]{1,0:S(5)}) tuple(%i, %v)
}
%cond (s: (s32[], f32[8,256])) -> pred[] {
  %s2 = (s32[], f32[8,256]{1,0:S(5)}) parameter(0)
  %i2 = s32[] get-tuple-element(%s2), index=0
  %n = s32[] constant(8)
  ROOT %lt = pred[] compare(%i2, %n), direction=LT
}
"""


def test_host_memory_is_not_counted_as_device_memory():
    parsed = module(
        """  %zero = s32[] constant(0)
  %h = f32[8,256]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %t0 = (s32[], f32[8,256]{1,0:S(5)}) tuple(%zero, %h)
  %w = (s32[], f32[8,256]{1,0:S(5)}) while(%t0), condition=%cond, body=%body
  %out = f32[8,256]{1,0:S(5)} get-tuple-element(%w), index=1
  %back = f32[8,256]{1,0} copy(%out)
  ROOT %r = f32[] dot(%back, %zero)""",
        TO_HOST,
    )
    assert host_copies(parsed).total() == 8 * KIB + 8 * KIB  # one row for each iteration, and a copy of all rows back
    assert max(buffer.bytes for buffer in temporaries(parsed)) == 8 * KIB
    assert [buffer.bytes for buffer in temporaries(parsed)].count(8 * KIB) == 1
    assert host_copies(module(LOOP, BODY)).total() == 0


def test_tiles_are_padded_and_on_chip_buffers_are_free():
    found = temporary_buffers("""  %p = f32[256]{0} parameter(0)
  %a = f32[3,100]{1,0:T(8,128)} dot(%p, %p)
  %b = f32[1024,1024]{1,0:T(8,128)S(1)} dot(%p, %p)
  %c = bf16[1024]{0:T(1024)(128)(2,1)} dot(%a, %b)
  ROOT %d = f32[] dot(%c, %a)""")
    assert [size for size, _ in found] == [8 * 128 * 4, 2 * KIB, 4]


def test_asynchronous_results_live_from_start_to_last_use():
    found = temporary_buffers(f"""  %p = f32[256]{{0}} parameter(0)
  %ags = (f32[256]{{0}}, f32[2048]{{0}}) all-gather-start(%p), replica_groups=[1,8]<=[8], {op_name("gathered")}
  %agd = f32[2048]{{0}} all-gather-done(%ags)
  %ars = (f32[256]{{0}}, f32[512]{{0}}) all-reduce-start(%p, %p), replica_groups={{}}, {op_name("summed")}
  %ard = (f32[256]{{0}}, f32[512]{{0}}) all-reduce-done(%ars)
  %one = f32[512]{{0}} get-tuple-element(%ard), index=1
  ROOT %d = f32[] dot(%one, %agd)""")
    assert found == [(8 * KIB, "gathered"), (2 * KIB, "summed"), (KIB, "summed")]


# The TPU compiler's form of a collective that runs beside a matmul: a fusion starts it, later ones pass its arrays on.
COLLECTIVE_BESIDE_MATMUL = f"""%beside (g: f32[512], n: u32[], x: f32[256]) -> (f32[1024], f32[512], u32[]) {{
  %x = f32[256]{{0}} parameter(2)
  %wide = f32[1024]{{0}} dot(%x, %x), {op_name("a matmul")}
  %g = f32[512]{{0}} parameter(0)
  %n = u32[] parameter(1)
  ROOT %t = (f32[1024]{{0}}, f32[512]{{0}}, u32[]) tuple(%wide, %g, %n)
}}
%negated (g: f32[512]) -> f32[512] {{
  %g1 = f32[512]{{0}} parameter(0)
  ROOT %m = f32[512]{{0}} negate(%g1), {op_name("written over it")}
}}
"""


def test_fusion_that_returns_or_overwrites_its_operand():
    """Only an in-place update writes its second operand; the roots of these fusions have none or one."""
    entry = f"""  %p = f32[256]{{0}} parameter(0)
  %g0 = f32[512]{{0}} dot(%p, %p), {op_name("gathered")}
  %n0 = u32[] constant(1)
  %f = (f32[1024]{{0}}, f32[512]{{0}}, u32[]) fusion(%g0, %n0, %p), kind=kOutput, calls=%beside, ALIAS, {op_name("a matmul")}
  %w = f32[1024]{{0}} get-tuple-element(%f), index=0
  %g1 = f32[512]{{0}} get-tuple-element(%f), index=1
  %last = f32[512]{{0}} OVER
  ROOT %r = f32[] dot(%last, %w)"""
    entry = entry.replace("ALIAS", "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}")
    passed = entry.replace("OVER", "bitcast(%g1)")
    assert temporary_buffers(passed, COLLECTIVE_BESIDE_MATMUL) == [(4 * KIB, "a matmul"), (2 * KIB, "gathered"), (4, "")]
    over = "fusion(%g1), kind=kLoop, calls=%negated, output_to_operand_aliasing={{}: (0, {})}"
    assert temporary_buffers(entry.replace("OVER", over), COLLECTIVE_BESIDE_MATMUL) == [
        (4 * KIB, "a matmul"),
        (2 * KIB, "written over it"),
        (4, ""),
    ]


def test_buffer_of_a_scatter_is_named_after_its_updates():
    text = f"""  %p = f32[256]{{0}} parameter(0)
  %i = s32[2,1]{{1,0}} parameter(1)
  %table = f32[1024]{{0}} dot(%p, %p), {op_name("zeros")}
  %u = f32[2]{{0}} dot(%p, %p), {op_name("rows")}
  %s = f32[1024]{{0}} scatter(%table, %i, %u), to_apply=%add
  ROOT %r = f32[] dot(%s, %p)"""
    assert temporary_buffers(text) == [(4 * KIB, "rows"), (8, "rows")]


def step(params, x):
    def loss(params):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def test_sum_of_buffers_equals_the_memory_analysis_of_the_compiler():
    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 64, 256), (6, 256, 64)))
    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(shapes, x).compile()
    parsed = Module.of(compiled.as_text())
    assert sum(b.bytes for b in temporaries(parsed)) == pytest.approx(
        compiled.memory_analysis().temp_size_in_bytes, rel=0.05
    )
    lines = {line for buffer in temporaries(parsed) for line in buffer.source}
    assert any(line.startswith(f"{__file__}:") for line in lines)
