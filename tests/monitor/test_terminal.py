"""The console on pseudo-terminals of several widths, without escape codes and without colours."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

PATH = "/home/user/experiments/2026-11-23/language_modelling/runs/llama-1b-bf16-fsdp2-tp2/ckpts/step_00000006"
RUN = f"""
import fcntl, os, struct, sys, termios, time
from redeqx.monitor import Console

def run():
    console = Console(None)
    console.header({{
        "mesh": "data=2 x fsdp=2 x model=2",
        "bytes per device": "2,357.1 MiB parameters, 4,714.2 MiB optimizer state",
        "precision": "bfloat16 for the loss, float32 parameters; 224 of 225 products with weights in fp8",
        "workdir": {PATH!r},
    }})
    metrics = {{"loss": 2.34512, "learning_rate": 3e-4, "grad_norm": 1.2345}}
    with console.progress(n_epochs=3, n_steps=6) as line:
        with line.compiling("train step") as notes:
            notes.append("from the cache")
        for step in range(1, 7):
            line.update(step, metrics=metrics, n_examples=512, n_tokens=1 << 20, epoch=1 + step // 3)
            time.sleep(0.25 if step == 3 else 0.01)
            if step == 3:
                print("printed by the user")
        console.info("step 6: eval loss 2.1234, eval perplexity 8.3611, eval accuracy 0.51234")
        console.info("step 6: saved {PATH} (last, argmin_loss)")
    console.table("sent", ("kind", "layer"), [("all-reduce", "stack.blocks.attention.output.weight")])
    console.header({{"eval loss": "2.1234"}}, title="done")
"""
SETTINGS = {
    "40": (40, {}),
    "80": (80, {}),
    "120": (120, {}),
    "dumb": (80, {"TERM": "dumb"}),
    "no colour": (80, {"NO_COLOR": "1"}),
}


@pytest.fixture(scope="module")
def written():
    """What one script writes to a pseudo-terminal in each setting."""
    script = f"""{RUN}
for width, env in {[*SETTINGS.values()]!r}:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    os.environ.update(TERM="xterm-256color")
    os.environ.update(env)
    run()
    print("=" * 9)
"""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    process = subprocess.Popen([sys.executable, "-c", script], stdin=child, stdout=child, stderr=child, env=env)
    os.close(child)
    data = b""
    try:
        while chunk := read(parent):
            data += chunk
        assert process.wait(60) == 0, data.decode()
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    return dict(zip(SETTINGS, data.decode().split("=" * 9), strict=False))


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""


def screen(text: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows. A line that wraps ends in a backslash."""
    rows, row, column = [""], 0, 0
    for code, char in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|([\s\S])", text):
        if char and char not in "\r\n":
            if column == width:
                rows[row] += "\\"
                row, column = row + 1, 0
                rows[row:] = rows[row:] or [""]
            rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
            column += 1
        elif char == "\n":
            row += 1
            rows[row:] = rows[row:] or [""]
        elif char == "\r":
            column = 0
        elif code == "2K":
            rows[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1] or 1)
        else:
            assert code.endswith("m") or code in ("?25l", "?25h"), code
    return [line.rstrip() for line in rows if line.strip()]


@pytest.mark.sweep
@pytest.mark.parametrize("name", SETTINGS)
def test_lines_are_complete_and_in_order(written, name):
    width = SETTINGS[name][0]
    lines = screen(written[name], width)
    whole = "\n".join(lines).replace("\\\n", "")
    assert PATH in whole  # in one piece
    order = [
        "redeqx", "mesh", "workdir", "compiled train step", "printed by the user", "step 6: eval", "step 6: saved",
        "step 6/6", "sent", "all-reduce", "done", "2.1234",
    ]  # fmt: skip
    order = order if name != "dumb" else [*order[:5], "step 6/6", "step 6: eval", "step 6: saved", *order[8:]]
    at = 0
    for what in order:
        at = whole.index(what, at) + 1
    assert len(re.findall("step 6/6", whole)) == 1
    fields = re.findall(r"[\d,]+ examples/s|[\d,]+ tokens/s|grad norm 1\.2345|lr 3\.00e-04", whole)
    assert len(set(fields)) >= 4  # no field is split at the end of a line


def test_escape_codes_match_the_terminal(written):
    assert "\x1b" not in written["dumb"] and "compiling train step" in written["dumb"]
    assert re.search(r"\x1b\[\d*;?3\dm", written["80"]) and not re.search(r"\x1b\[\d*;?[349]\dm", written["no colour"])
