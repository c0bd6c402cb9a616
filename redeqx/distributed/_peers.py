"""The other processes of a run: a message channel that is independent of JAX's collectives, and works when those hang.

JAX's collectives, and `multihost_utils` over them, carry arrays, belong to the thread that takes the steps, and wait for
ever for a missing peer. This channel carries JSON over TCP, in its own threads: whether all processes agree, how far each
one is, which one is gone or fails. It is a star, as `_links.meet` connects it: process 0 is the coordinator, and forwards
broadcasts. This module makes sure that no process waits for one that has ended.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import warn
from ._addresses import Member
from ._exits import PATIENCE, exit_now, say
from ._links import START, Link, PeerError, meet

EXIT_CODE = 75  # EX_TEMPFAIL: schedulers are configured to requeue on it
# After an error of the script, which a rerun would repeat. `srun` returns the highest code of its tasks: none may be 75.
FAILURE = 1
HEARTBEAT = 30.0  # seconds of silence after which a peer counts as gone
_LEAVE_TIMEOUT = 4.0  # seconds to wait for the others to leave when one fails

_SAME_SCRIPT = "Every process must run the same script with the same arguments."


class Peers:
    """This process and the others of its run."""

    def __init__(self, n: int = 1, index: int = 0, heartbeat: float = HEARTBEAT):
        self.n: int = n  # the number of processes
        self.index: int = index  # of this one, from 0
        self.heartbeat: float = heartbeat  # seconds of silence after which another process counts as gone
        self.committed: int | None = None  # the last step that is safe on disk, which a process prints before it leaves
        self.step: int | None = None  # the last one of this process
        self._links: dict[int, Link] = {}  # to the coordinator; at the coordinator, to each other process
        self._n_calls: Counter[str] = Counter()
        self._contributed: dict[str, dict[int, Any]] = {}  # at the coordinator: contributions so far, by gathering
        self._results: dict[str, list[Any]] = {}
        self._compared: dict[str, dict[int, Any]] = {}  # at the coordinator: values so far, by comparison
        self._difference_found: str | None = None  # the error message of a comparison that failed
        self._left: set[int] = set()  # the processes that have ended, announced or not
        self._failed: int | None = None  # the failed process that reports the reason for all
        self._answered: dict[int, float] = {}  # at the coordinator: when each other process last answered `ask`
        self._is_leaving = False  # this process is about to leave, and a thread of it prints the reason
        self._is_forked = False
        self._change = threading.Condition()
        self._handlers: dict[str, Callable[[int, Any], None]] = {}

    # --- collective operations -----------------------------------------------------------------------------------------

    def gather(self, topic: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        """Gathers one value from every process; waits for all of them. Returns the values in the order of the processes.

        Each call with a topic is a new gathering; all processes make those of one topic in the same order. Several threads
        may gather different topics in any order.

        Raises PeerError if a process does not contribute its value (JSON) in `timeout` seconds; None waits as long as the
        others live.
        """
        value = json.loads(json.dumps(value))  # as the others receive it: a tuple is a list
        return [value] if self.n == 1 else self.wait(self.contribute(topic, value), timeout)

    def contribute(self, topic: str, value: Any) -> str:
        """Adds this process's value to a gathering, without waiting; returns the gathering's name, for `wait`."""
        if self._is_forked:
            raise PeerError(
                "`Deployer`: expected a call from a process of the run, got one from a forked child. "
                "Train, evaluate and save in the process that made the Deployer."
            )
        with self._change:
            self._n_calls[topic] += 1
            name = f"{topic} {self._n_calls[topic]}"
        if self.index == 0:
            self._collect(0, name, value)
        else:
            self._send(0, "contribute", [name, value])
        return name

    def wait(self, name: str, timeout: float | None = None) -> list[Any]:
        """Waits for the gathering that `contribute` named; returns its result."""
        with self._change:
            if not self._change.wait_for(lambda: name in self._results, timeout):
                here = self._contributed.get(name, {})
                who = sorted(set(range(self.n)) - set(here)) if self.index == 0 else "another process"
                raise PeerError(f"`{name}`: expected every process within {timeout:g} s, got none from {who}.")
            return self._results.pop(name)

    def _collect(self, index: int, name: str, value: Any) -> None:
        """At the coordinator: stores a process's contribution; after the last one, sends the result to all processes."""
        with self._change:
            contributed = self._contributed.setdefault(name, {})
            contributed[index] = value
            is_complete = len(contributed) == self.n
            if is_complete:
                del self._contributed[name]
        if not is_complete:
            self._end_if_missing()
            return
        result = [contributed[i] for i in range(self.n)]
        for i in self._links:
            self._send(i, "result", [name, result])
        with self._change:  # last: this process may end when it has the result, and then its threads can no longer send
            self._results[name] = result
            self._change.notify_all()

    def _end_if_missing(self) -> None:
        """At the coordinator: ends the run if a gathering waits for a process whose script has ended."""
        with self._change:
            missing = [i for i in sorted(self._left) if any(i not in each for each in self._contributed.values())]
        if missing and self._failed is None:
            self.end(
                f"process {missing[0]} of {self.n} has come to the end of its script, while others wait for it", FAILURE
            )

    def together(
        self, topic: str, act: Callable[[], Any], *, alone: bool = False, kinds: Sequence[type[Exception]] = (OSError,)
    ) -> list[Any]:
        """Calls `act` in every process, or `alone` in process 0 while the others contribute None; returns the results (JSON)
        in the order of the processes.

        If it raises one of these `kinds` of errors in one process, all raise an error of the same kind with the same text;
        of several that match, the first is raised.
        """
        if self.n == 1:
            return self.gather(topic, act())
        value = error = problem = None
        if not alone or self.index == 0:
            try:
                value = act()
            except tuple(kinds) as raised:
                error = raised
        if error is not None:
            args = [str(error)]
            if isinstance(error, OSError):
                args = [f"{error.strerror or error} (process {self.index})"]
                if error.errno is not None:
                    args = [error.errno, *args, None if error.filename is None else str(error.filename)]
            problem = [next(i for i, kind in enumerate(kinds) if isinstance(error, kind)), args]
        found = self.gather(topic, [value, problem])
        for _, problem in found:
            if problem is not None:
                raise kinds[problem[0]](*problem[1]) from error
        return [value for value, _ in found]

    def agree(self, what: str, values: Mapping[str, Any], advice: str = _SAME_SCRIPT) -> None:
        """Checks that every process has the same values by name; waits for all of them.

        Raises ValueError, the same in every process, that names the first field that differs.
        """
        if self.n > 1:
            difference = _difference(what, dict(enumerate(self.gather(f"agree on {what}", _plain(values)))), advice)
            if difference is not None:
                raise ValueError(difference)

    def decide(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """Returns process 0's values by name in all processes, so that decisions based on them are the same everywhere.
        Process 0 warns if another process has different ones."""
        if self.n == 1:
            return values
        found = self.gather(f"decide {what}", values)
        if self.index == 0:
            difference = _difference(what, dict(enumerate(found)), "Process 0's is used: compute it from all the outputs.")
            if difference is not None:
                warn(difference)
        return found[0]

    def compare(self, topic: str, what: str, values: Mapping[str, Any], advice: str = _SAME_SCRIPT) -> None:
        """As `agree`, without waiting: once the coordinator finds a difference, `check` raises it in every process. `topic`
        is the name of this comparison; each process uses it at most once."""
        plain = _plain(values)
        if self.index == 0:
            self._compare(0, topic, what, plain, advice)
        else:
            self._send(0, "compare", [topic, what, plain, advice])

    def _compare(self, index: int, topic: str, what: str, values: Any, advice: str) -> None:
        with self._change:
            compared = self._compared.setdefault(topic, {})
            compared[index] = values
            if len(compared) == self.n:
                del self._compared[topic]
            self._difference_found = self._difference_found or _difference(what, compared, advice)
        if self._difference_found is not None:
            for i in self._links:
                self._send(i, "differs", self._difference_found)

    def check(self) -> None:
        """Raises ValueError if a comparison has found that the processes differ."""
        if self._difference_found is not None:
            raise ValueError(self._difference_found)

    def on(self, topic: str, handle: Callable[[int, Any], None]) -> None:
        """Calls `handle(index, value)`, in a thread, for each message that another process broadcasts on this topic."""
        self._handlers[topic] = handle

    def broadcast(self, topic: str, value: Any = None) -> None:
        """Sends a message to every other process, without waiting."""
        if self.index == 0:
            self._forward(0, topic, value)
        else:
            self._send(0, "message", [self.index, topic, value])

    def _forward(self, index: int, topic: str, value: Any) -> None:
        """At the coordinator: sends a process's message to the others."""
        for i in self._links:
            if i != index:
                self._send(i, "message", [index, topic, value])

    @property
    def n_contributed(self) -> int:
        """The number of gatherings that this process has contributed to."""
        return self._n_calls.total()

    def meet(self, member: Member, timeout: float = START) -> None:
        """Connects to all processes by `_links.meet`, and receives their messages from then on."""
        self._links = meet(member, timeout)
        for i, link in self._links.items():
            link.limit(self.heartbeat)
            threading.Thread(target=self._listen, args=(i, link), name=f"redeqx-peer-{i}", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="redeqx-beat", daemon=True).start()

    # --- the channel ---------------------------------------------------------------------------------------------------

    def _send(self, to: int, kind: str, value: Any = None) -> None:
        link = self._links.get(to)  # a forked child has none
        if link is not None:
            with contextlib.suppress(OSError):  # the thread that receives from this link notices
                link.send(kind, value)

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(self.heartbeat / 5)
            for i in self._links:
                self._send(i, "beat")

    def _listen(self, index: int, link: Link) -> None:
        why = "its connection was closed"
        try:
            while True:
                self._receive(index, *link.receive())
        except TimeoutError:
            why = f"no message from it for {self.heartbeat:g} s"
        except (OSError, ValueError):
            pass
        self._handle_disconnect(index, why)

    def _receive(self, index: int, kind: str, value: Any) -> None:
        if kind == "contribute":
            self._collect(index, *value)
        elif kind == "compare":
            self._compare(index, *value)
        elif kind == "differs":
            self._difference_found = value
        elif kind == "result":
            with self._change:
                self._results[value[0]] = value[1]
                self._change.notify_all()
        elif kind == "message":
            sender, topic, content = value
            if self.index == 0:
                self._forward(sender, topic, content)
            if topic in self._handlers:
                self._handlers[topic](sender, content)
        elif kind == "ask":
            self._send(0, "answer")
        elif kind == "answer":
            with self._change:
                self._answered[index] = time.monotonic()
                self._change.notify_all()
        elif kind == "bye":
            with self._change:
                self._left.add(index)
                self._change.notify_all()
            if self.index == 0:
                self._end_if_missing()
        elif kind == "fails":
            # In a thread: this one receives the answer of the process that fails.
            threading.Thread(target=self._handle_failure, args=(index, value), name="redeqx-farewell", daemon=True).start()
        elif kind == "failed":
            with self._change:
                self._failed = value
                self._change.notify_all()
            if value != self.index:
                exit_now(FAILURE)
        elif kind == "lost":
            why, code = value
            self.leave(why, code)

    # --- ends ------------------------------------------------------------------------------------------------------------

    def _handle_disconnect(self, index: int, why: str) -> None:
        """Ends the run, unless the process at the other end was expected to leave."""
        with self._change:
            expected = index in self._left or self._failed is not None
            self._left.add(index)
            # In one step with `_left`: a failure that waits for an answer of this process must find that the run ends.
            ends = not expected and not self._is_leaving
            self._is_leaving |= ends
            self._change.notify_all()
        if ends:
            self._end_all(f"process {index} of {self.n} is gone: {why}", EXIT_CODE)

    def end(self, why: str, code: int) -> None:
        """Leaves, and makes all others leave; from any thread."""
        if self.claim_end():
            self._end_all(why, code)

    def _end_all(self, why: str, code: int) -> NoReturn:
        for i in self._links:
            self._send(i, "lost", [why, code])
        self.leave(why, code)

    def leave(self, why: str, code: int) -> NoReturn:
        """Ends this process at once, from any thread. The last line names the step that is safe on disk."""
        safe = "no step was committed yet" if self.committed is None else f"the last committed step is {self.committed}"
        advice = ": run it again to go on" if code == EXIT_CODE else ""
        say(f"redeqx: {why}; {safe}. Leaving with exit code {code}{advice}.")
        # Not `sys.exit`: the main thread may be in a collective that never ends, and JAX waits at exit for those missing.
        exit_now(code)

    def claim_end(self) -> bool:
        """Returns whether the caller is the first to end this process: it then prints the reason, and calls `leave`. From
        then on a closed connection is no reason: the others may be leaving for the same one."""
        with self._change:
            is_first, self._is_leaving = not self._is_leaving, True
        return is_first

    def fail(self, *, in_runtime: bool = False) -> bool:
        """Announces that an exception ends this process, and waits until the others have left.

        JAX's runtime raises one (`in_runtime`) also if a process is gone, maybe before this channel notices it. Then that
        process is the reason: this call does not return, as `end` ends the run.

        Returns True if this process prints the traceback: if several fail at once, only one does.
        """
        if self.n == 1:
            return True
        if self._is_leaving:  # for another reason: a thread ends this process
            time.sleep(2 * PATIENCE)
        if self.index == 0:
            self._handle_failure(0, in_runtime)
            if self._failed is None:  # a process was gone: the thread that noticed it ends this one
                time.sleep(2 * PATIENCE)
        else:
            self._send(0, "fails", in_runtime)
        with self._change:
            self._change.wait_for(lambda: self._failed is not None, timeout=2 + self.heartbeat * in_runtime)
            reports = self._failed in (self.index, None)
        if reports or self.index == 0:
            self._wait_for_ends()
        return reports

    def _handle_failure(self, index: int, in_runtime: bool) -> None:
        """At the coordinator: tells all that a process failed. The first one to fail reports for all."""
        if in_runtime:
            self._wait_for_answers()
        with self._change:
            if self._failed is not None or self._is_leaving:
                return
            self._failed = index
            self._change.notify_all()
        for i in self._links:
            self._send(i, "failed", index)
        if index != 0:
            self._wait_for_ends()
            exit_now(FAILURE)

    def _wait_for_answers(self) -> None:
        """At the coordinator: waits until each process that runs has answered. If one is gone, `end` ends the run."""
        now = time.monotonic()
        for i in self._links:
            self._send(i, "ask")
        has_answered = lambda i: i in self._left or self._answered.get(i, 0) > now  # noqa: E731
        with self._change:
            self._change.wait_for(lambda: all(map(has_answered, self._links)), timeout=self.heartbeat)

    def _wait_for_ends(self) -> None:
        """Waits until the others have left, except for the one that reports. The coordinator leaves last."""
        with self._change:
            others = {0} if self.index else set(range(1, self.n)) - {self._failed}
            self._change.wait_for(lambda: others <= self._left, timeout=_LEAVE_TIMEOUT if self.index else _LEAVE_TIMEOUT / 2)

    def close(self) -> None:
        """Announces that this process ends without a failure."""
        for i in self._links:
            self._send(i, "bye")
        if self.index == 0 and self._links:
            with self._change:
                self._left.add(0)
            self._end_if_missing()

    def forget(self) -> None:
        """In a forked child, which does not belong to the run: closes its copies of the connections, sends no message."""
        links, self._links, self._is_forked = self._links, {}, True
        for link in links.values():
            link.close()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values after a round trip through JSON: a tuple becomes a list."""
    return json.loads(json.dumps(dict(values), default=str))


def _difference(what: str, values_of: Mapping[int, Mapping[str, Any]], advice: str) -> str | None:
    """Returns an error message for the first field in which the processes' values differ; None if all are equal."""
    first = min(values_of)
    for name in dict.fromkeys(name for values in values_of.values() for name in values):
        expected = values_of[first].get(name)
        for index, values in sorted(values_of.items()):
            found = values.get(name)
            if found != expected and (found == found or expected == expected):  # NaN equals NaN here
                shown = [json.dumps(value) if not isinstance(value, str) else value for value in (expected, found)]
                return (
                    f"`{what}`: expected `{name}` to be {shown[0]}, as in process {first}, got {shown[1]} in process "
                    f"{index}. {advice}"
                )
    return None
