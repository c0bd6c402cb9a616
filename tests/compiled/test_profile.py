"""The table of a profile: traces in the formats of CPUs, GPUs and TPUs, compared with hand-computed sums."""

from pathlib import Path

import equinox
import jax
import optax
import pytest

import redeqx
from redeqx.compiled import profile_of

TRAINING = Path(redeqx.__file__).parent / "training/_step.py"
# A program as XLA prints it: a matmul in a loop of 4, its gradient in a fusion, a library call and an optax update.
HLO = f"""HloModule jit_step_fn, is_scheduled=true, num_partitions=2

FileNames
1 "/home/me/train.py"
2 "{Path(optax.__file__).parent}/_src/update.py"
3 "{TRAINING}"
4 "{Path(equinox.__file__).parent}/nn/_linear.py"

FunctionNames
1 "loss_fn"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=2}}
3 {{file_name_id=3 function_name_id=1 line=300 end_line=300 column=1 end_column=2}}
4 {{file_name_id=1 function_name_id=1 line=99 end_line=99 column=1 end_column=2}}
5 {{file_name_id=4 function_name_id=1 line=50 end_line=50 column=1 end_column=2}}

StackFrames
1 {{file_location_id=4 parent_frame_id=1}}
2 {{file_location_id=3 parent_frame_id=2}}
3 {{file_location_id=1 parent_frame_id=3}}
4 {{file_location_id=5 parent_frame_id=4}}
5 {{file_location_id=2 parent_frame_id=3}}
6 {{file_location_id=2 parent_frame_id=4}}


%fused (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %grad = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step_fn)/transpose(jvp(mlp))/while/body/dot_general" stack_frame_id=4}}
  ROOT %copy = f32[8,8]{{1,0}} copy(%grad)
}}

%body (q: f32[8,8]) -> f32[8,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %dot.1 = f32[8,8]{{1,0}} dot(%q, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step_fn)/jvp(mlp)/while/body/dot_general" stack_frame_id=4}}
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %while.1 = f32[8,8]{{1,0}} while(%x), condition=%cond, body=%body
  %fusion.2 = f32[8,8]{{1,0}} fusion(%while.1), kind=kLoop, calls=%fused
  %call.3 = f32[8,8]{{1,0}} custom-call(%fusion.2), custom_call_target="__cublas$gemm", metadata={{op_name="jit(step_fn)/dot_general" stack_frame_id=3}}
  ROOT %add.5 = f32[8,8]{{1,0}} add(%call.3, %x), metadata={{op_name="jit(step_fn)/add" stack_frame_id=5}}
}}
"""  # noqa: E501
MS = 10**9  # picoseconds


def trace(folder, planes):
    """Writes a trace. `planes` maps each plane to its lines, and these to events `(name, start, duration, stats)` in ms."""
    text = ""
    for plane, lines in planes.items():
        names = sorted({event[0] for events in lines.values() for event in events})
        stats = sorted({stat for events in lines.values() for event in events for stat in event[3]})
        text += f'planes {{ name: "{plane}"\n'
        for line, events in lines.items():
            text += f'lines {{ name: "{line}"\n'
            for name, start, duration, given in events:
                shown = "".join(
                    f"stats {{ metadata_id: {stats.index(stat) + 1} "
                    + (f"int64_value: {x} }}" if isinstance(x, int) else f'str_value: "{x}" }}')
                    for stat, x in given.items()
                )
                spans = f"offset_ps: {int(start * MS)} duration_ps: {int(duration * MS)}"
                text += f"events {{ metadata_id: {names.index(name) + 1} {spans} {shown} }}\n"
            text += "}\n"
        for kind, each in (("event", names), ("stat", stats)):
            for i, name in enumerate(each, start=1):
                text += f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        text += "}\n"
    path = folder / "host.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    return path


# The instructions of a step of 20 ms, each with its start and duration in ms. The loop encloses its body.
STEP = [
    ("while.1", 0, 8),
    *(("dot.1", 2 * i, 1.5) for i in range(4)),
    ("fusion.2", 8, 7),
    ("call.3", 15, 3),
    ("add.5", 18, 2),
]
STEPS = [(name, start + 20 * i, duration) for i in range(2) for name, start, duration in STEP]


def on_cpu():
    def events(device):
        stats = {"hlo_module": "jit_step_fn", "device_ordinal": device}
        return [(name, start, duration, {"hlo_op": name, **stats}) for name, start, duration in STEPS]

    other = ("dot.1", 5, 100, {"hlo_op": "dot.1", "hlo_module": "jit_other", "device_ordinal": 0})
    return {"/host:CPU": {"worker/1": [*events(0), other, ("end: dot.1", 1, 50, {})], "worker/2": events(1)}}


def on_gpu():
    def events(stream):
        return [
            (f"kernel_{name}", start, duration, {"hlo_op": name, "hlo_module": "jit_step_fn(123)"})
            for name, start, duration in STEPS
            if (name == "add.5") == (stream == 2) and name != "while.1"
        ]

    lines = {"Stream #1(Compute)": [*events(1), ("MemcpyH2D", 3, 90, {})], "Stream #2(Compute)": events(2)}
    return {"/device:GPU:0": lines, "/device:GPU:1": lines}


def on_tpu():
    ops = [(f"%{name} = f32[8,8] thing()", start, duration, {}) for name, start, duration in STEPS]
    other = ("%dot.1 = f32[8,8] thing()", 60, 100, {})  # of another program, after the steps
    modules = [("jit_step_fn(123)", 20 * i, 20, {}) for i in range(2)] + [("jit_other(9)", 60, 100, {})]
    return {"/device:TPU:0": {"XLA Modules": modules, "XLA Ops": [*ops, other], "Steps": [("0", 0, 40, {})]}}


@pytest.mark.parametrize(("planes", "n_devices"), [(on_cpu, 2), (on_gpu, 2), (on_tpu, 1)])
def test_times_and_shares_of_operations(planes, n_devices, tmp_path):
    """Counts the operations inside a loop but not the loop itself, and no operation of another program."""
    found = profile_of(trace(tmp_path, planes()), HLO, 2)
    assert found is not None and found.n_devices == n_devices and found.seconds == pytest.approx(0.020)
    rows = [(of.kind, of.op, of.n) for of in found.operations]
    assert rows == [
        ("fusion of dot", "mlp/dot_general, backward", 1),
        ("dot", "mlp/dot_general", 4),
        ("__cublas$gemm", "dot_general", 1),
        ("add", "add", 1),
    ]
    assert [of.seconds for of in found.operations] == pytest.approx([0.007, 0.006, 0.003, 0.002])
    assert [of.share for of in found.operations] == pytest.approx([0.35, 0.3, 0.15, 0.1])


def test_lines_are_in_the_code_of_the_user(tmp_path):
    """Skips the lines of libraries that the loss calls, and for the optimizer the line that calls `fit`."""
    found = profile_of(trace(tmp_path, on_tpu()), HLO, 2)
    assert found is not None
    lines = {of.kind: of.line for of in found.operations}
    loss = "/home/me/train.py:7"
    assert lines == {"dot": loss, "fusion of dot": loss, "__cublas$gemm": loss, "add": "optax/_src/update.py:20"}
    of_loss = HLO.replace('jit(step_fn)/add" stack_frame_id=5', 'jit(step_fn)/add" stack_frame_id=6')
    found = profile_of(trace(tmp_path, on_tpu()), of_loss, 2)
    assert found is not None and found.operations[-1].line == loss  # optax's, called by the loss


def test_table_text(tmp_path):
    found = profile_of(trace(tmp_path, on_tpu()), HLO, 2)
    assert found is not None
    assert found.text(2).splitlines() == [
        "time      share  times  kind           operation                  line",
        "7.000 ms  35.0%  1      fusion of dot  mlp/dot_general, backward  /home/me/train.py:7",
        "6.000 ms  30.0%  4      dot            mlp/dot_general            /home/me/train.py:7",
        "of 20.000 ms a step: these 65.0%, 2 others 25.0%; a device's mean over 1",
    ]
    assert "others" not in found.text(4)


def test_trace_of_another_program_gives_none(tmp_path):
    text = HLO.replace("jit_step_fn", "jit_eval_fn")
    assert all(profile_of(trace(tmp_path, planes()), text, 2) is None for planes in (on_cpu, on_gpu, on_tpu))
