"""Several processes of one command: what they print is told apart, and how they end is kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from redeqx.distributed import _launch

SETTLE = 'import os, signal, sys, time; i = int(os.environ["REDEQX_PROCESS_ID"])\n'


def launched(code, n=2, **arguments):
    """The exit code of `n` processes that run this, where `i` is their number."""
    return _launch.launch(n, [sys.executable, "-S", "-c", SETTLE + code], **arguments)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(_launch, "GRACE", 0.5)


def test_each_has_its_number_and_its_output_begins_with_it(capfd):
    code = """
print(*(os.environ[f"REDEQX_{name}"] for name in ("PROCESSES", "PROCESS_ID", "HOST0")), os.environ["PYTHONUNBUFFERED"])
print("more"); print("wrong", i, file=sys.stderr); print("no end", end="")
"""
    assert launched(code, n=3, port=1234) == 0
    out, err = capfd.readouterr()
    for i in range(3):
        assert [line for line in out.replace("no end", "no end\n").splitlines() if line.startswith(f"[{i}] ")] == [
            f"[{i}] 3 {i} 127.0.0.1:1234 1",
            f"[{i}] more",
            f"[{i}] no end",
        ]
    assert sorted(err.splitlines()) == [f"[{i}] wrong {i}" for i in range(3)]


def test_all_are_told_of_one_free_port(capfd):
    assert launched('print(os.environ["REDEQX_HOST0"])') == 0
    hosts = {line.split()[1] for line in capfd.readouterr().out.splitlines()}
    (host,) = hosts
    assert host.startswith("127.0.0.1:")
    assert int(host.partition(":")[2]) > 0


def test_what_is_no_text_is_printed_all_the_same(capfd):
    assert launched(r'sys.stdout.buffer.write(b"a\xffb\n")', n=1) == 0
    assert capfd.readouterr().out == "[0] a\N{REPLACEMENT CHARACTER}b\n"


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_code_of_the_one_that_failed_is_kept(culprit):
    """Not that of one that left because of it, though it left before."""
    assert launched(f"time.sleep(0.2 * (i == {culprit})); sys.exit(3 if i == {culprit} else 75)") == 3


def test_where_all_left_their_code_is_kept():
    assert launched("sys.exit(75 if i else 0)", n=3) == 75


def test_a_signal_that_ended_one_is_128_and_its_number():
    assert launched("os.kill(os.getpid(), signal.SIGKILL) if i == 1 else sys.exit(75)") == 137


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_others_are_ended_after_the_grace(capfd, culprit):
    """Whichever it is, and though they do not listen."""
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid())
sys.exit(3) if i == {culprit} else time.sleep(120)
"""
    assert launched(code, n=3) == 3
    for line in capfd.readouterr().out.splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)


def test_the_others_may_end_by_themselves_in_the_grace(capfd, monkeypatch):
    monkeypatch.setattr(_launch, "GRACE", 60.0)
    assert launched('sys.exit(3) if i else (time.sleep(0.5), print("saved"))') == 3
    assert capfd.readouterr().out == "[0] saved\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_are_passed_on(capfd, tmp_path, name):
    """To each; afterwards they are this process's again."""
    before = signal.getsignal(getattr(signal, name))
    code = f"""
signal.signal(signal.{name}, lambda *_: (print("told"), sys.exit(75)))
open("{tmp_path}/" + str(i), "w").close()
if i == 1:
    while not os.path.exists("{tmp_path}/0"): time.sleep(0.01)
    time.sleep(0.5)  # the launcher listens by now
    os.kill(os.getppid(), signal.{name})
time.sleep(60)
"""
    assert launched(code) == 75
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] told", "[1] told"]
    assert signal.getsignal(getattr(signal, name)) is before


def test_the_processes_end_with_the_launcher(tmp_path):
    """Which is killed, and can tell them nothing."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n")
    launcher = started("--processes", "2", str(script))
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    launcher.kill()
    launcher.communicate(timeout=60)
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_processes_go_on_where_nobody_reads_what_they_print(tmp_path):
    """And their exit code is kept."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nfor _ in range(3000): print('x' * 100)\nprint('done', file=sys.stderr)\nsys.exit(4)\n")
    launcher = started("--processes", "2", str(script))
    launcher.stdout.close()
    assert sorted(launcher.stderr.read().splitlines()) == ["[0] done", "[1] done"]
    assert launcher.wait(timeout=60) == 4
    launcher.stderr.close()


def started(*arguments):
    command = [sys.executable, "-m", "redeqx", "launch", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_line_launches_a_script(tmp_path):
    """With its arguments; one that is not there is said."""
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
