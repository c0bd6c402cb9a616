"""Several processes started by one command: output is labelled by process, and the exit code is preserved."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from redeqx.distributed import launch as launch_processes

PRELUDE = 'import os, signal, sys, time; i = int(os.environ["REDEQX_PROCESS_ID"])\n'


def launch_code(code, n=2, **arguments):
    """The exit code of `n` processes that run `code`, in which `i` is the process index."""
    return launch_processes(n, [sys.executable, "-S", "-c", PRELUDE + code], **arguments)


@pytest.fixture(autouse=True)
def long_grace(monkeypatch):
    """On busy cores a process may take seconds to start."""
    monkeypatch.setattr("redeqx.distributed._launch.GRACE", 60.0)


def test_output_lines_begin_with_the_process_index(capfd):
    code = """
print(*(os.environ[f"REDEQX_{name}"] for name in ("PROCESSES", "PROCESS_ID", "HOST0")), os.environ["PYTHONUNBUFFERED"])
print("more"); print("wrong", i, file=sys.stderr); print("no end", end="")
"""
    assert launch_code(code, n=3, port=1234) == 0
    out, err = capfd.readouterr()
    for i in range(3):
        assert [line for line in out.replace("no end", "no end\n").splitlines() if line.startswith(f"[{i}] ")] == [
            f"[{i}] 3 {i} 127.0.0.1:1234 1",
            f"[{i}] more",
            f"[{i}] no end",
        ]
    assert sorted(err.splitlines()) == [f"[{i}] wrong {i}" for i in range(3)]


def test_all_processes_get_the_same_free_port(capfd):
    assert launch_code('print(os.environ["REDEQX_HOST0"])') == 0
    hosts = {line.split()[1] for line in capfd.readouterr().out.splitlines()}
    (host,) = hosts
    assert host.startswith("127.0.0.1:")
    assert int(host.partition(":")[2]) > 0


def test_invalid_utf8_is_replaced(capfd):
    assert launch_code(r'sys.stdout.buffer.write(b"a\xffb\n")', n=1) == 0
    assert capfd.readouterr().out == "[0] a\N{REPLACEMENT CHARACTER}b\n"


@pytest.mark.parametrize("encoding", [pytest.param("latin-1", marks=pytest.mark.sweep), "ascii"])
@pytest.mark.sweep
def test_bytes_that_the_terminal_cannot_show_are_passed_on(tmp_path, encoding):
    (tmp_path / "run.py").write_text(
        r"""
import sys
sys.stdout.buffer.write(b"\xe9\xff\n")
sys.stdout.flush()
for i in range(20_000):  # more than a pipe holds
    print("line", i)
"""
    )
    command = [sys.executable, "-m", "redeqx", "launch", "--processes", "1", "run.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == b"[0] \xe9\xff" and lines[-1] == b"[0] line 19999"


@pytest.mark.parametrize("culprit", [0, 1])
def test_exit_code_of_the_failed_process_is_kept(culprit):
    """Not the code of a process that left because of it, even if that one left first."""
    assert launch_code(f"time.sleep(0.2 * (i == {culprit})); sys.exit(3 if i == {culprit} else 75)") == 3


def test_exit_code_75_is_kept_if_no_process_failed():
    assert launch_code("sys.exit(75 if i else 0)", n=3) == 75


def test_exit_code_of_a_signal_is_128_plus_its_number():
    assert launch_code("os.kill(os.getpid(), signal.SIGKILL) if i == 1 else sys.exit(75)") == 137


@pytest.mark.parametrize("culprit", [0, 1])
def test_others_are_killed_after_the_grace_period(monkeypatch, tmp_path, culprit):
    """Whichever process failed, and although the others ignore SIGTERM."""
    monkeypatch.setattr("redeqx.distributed._launch.GRACE", 0.5)
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.close(os.open("{tmp_path}/" + str(os.getpid()), os.O_CREAT))
while i == {culprit} and len(os.listdir("{tmp_path}")) < 3: time.sleep(0.01)
sys.exit(3) if i == {culprit} else time.sleep(120)
"""
    assert launch_code(code, n=3) == 3
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_others_may_exit_during_the_grace_period(capfd):
    assert launch_code('sys.exit(3) if i else (time.sleep(0.5), print("saved"))') == 3
    assert capfd.readouterr().out == "[0] saved\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_are_forwarded(capfd, tmp_path, name):
    """Every process receives the signal; afterwards the previous handler is restored."""
    number = getattr(signal, name)
    code = f"""
signal.signal(signal.{name}, lambda *_: (signal.signal(signal.{name}, signal.SIG_IGN), print("told"), sys.exit(75)))
open("{tmp_path}/" + str(i), "w").close()
while i == 1 and not os.path.exists("{tmp_path}/0"): time.sleep(0.01)
while True:
    if i == 1: os.kill(os.getppid(), signal.{name})  # again and again: the launcher may not listen yet
    time.sleep(0.2)
"""

    def ignore(number, frame):
        pass

    before = signal.signal(number, ignore)
    try:
        assert launch_code(code) == 75
        assert signal.getsignal(number) is ignore
    finally:
        signal.signal(number, before)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] told", "[1] told"]


def test_processes_end_with_the_launcher(tmp_path):
    """Even if the launcher is killed and cannot forward a signal."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n")
    launcher = start_launcher("--processes", "2", str(script))
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    launcher.kill()
    launcher.communicate(timeout=60)
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.sweep
def test_processes_continue_after_stdout_is_closed(tmp_path):
    """The exit code is preserved."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nfor _ in range(3000): print('x' * 100)\nprint('done', file=sys.stderr)\nsys.exit(4)\n")
    launcher = start_launcher("--processes", "2", str(script))
    launcher.stdout.close()
    assert sorted(launcher.stderr.read().splitlines()) == ["[0] done", "[1] done"]
    assert launcher.wait(timeout=60) == 4
    launcher.stderr.close()


def start_launcher(*arguments):
    command = [sys.executable, "-m", "redeqx", "launch", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_command_line_launches_a_script(tmp_path):
    """The script gets its arguments; a missing script is reported."""
    (tmp_path / "script.py").write_text(
        'import os, sys\nprint(os.environ["REDEQX_PROCESS_ID"], sys.argv[1:])\nsys.exit(4)\n'
    )
    command = [sys.executable, "-m", "redeqx", "launch", "--processes", "2"]
    runs = [
        subprocess.Popen(
            [*command, *script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in (["script.py", "--epochs", "3"], ["missing.py"])
    ]
    (out, _), (nothing, why) = (run.communicate(timeout=120) for run in runs)
    assert sorted(out.splitlines()) == ["[0] 0 ['--epochs', '3']", "[1] 1 ['--epochs', '3']"]
    assert [run.returncode for run in runs] == [4, 1]
    assert nothing == ""
    assert why == "`missing.py`: expected a script, got no such file. For a module write `-m missing.py`.\n"
