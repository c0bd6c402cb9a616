"""The other processes of a run: a channel of words beside JAX's collectives, for what must be said when those are stuck.

JAX's collectives carry arrays, and wait for ever for a peer that does not come. This channel carries JSON over TCP, by
threads of its own: whether all agree, how far each one is, that one is gone or fails. It is a star, as `_rendezvous` left
it: what one says to all goes by process 0, the hub. That nobody waits for the dead is this room's.
"""

import contextlib
import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ._exits import exit_now, say
from ._links import Link, PeerError
from ._rendezvous import START, meet

EXIT_CODE = 75  # EX_TEMPFAIL: what schedulers are told to requeue on
HEARTBEAT = 30.0  # seconds of silence after which a peer counts as gone
_FAREWELL = 4.0  # seconds that the others are waited for where one fails

_SAME_SCRIPT = "Every process must run the same script with the same arguments."


class Peers:
    """This process among those of its run.

    **Arguments:**

    - `n`, `index`: how many processes there are, and which this is, from 0.
    - `heartbeat`: seconds of silence after which another counts as gone.
    - `committed`: the last step that is safe on disk; what a process that has to leave says last.
    """

    def __init__(self, n: int = 1, index: int = 0, heartbeat: float = HEARTBEAT):
        self.n, self.index, self.heartbeat = n, index, heartbeat
        self.committed: int | None = None
        self.step: int | None = None  # how far this process is
        self._links: dict[int, Link] = {}  # to the hub, or from it to each
        self._asked: Counter[str] = Counter()
        self._given: dict[str, dict[int, Any]] = {}  # at the hub: what was given so far to each gathering
        self._answers: dict[str, Any] = {}
        self._compared: dict[str, dict[int, Any]] = {}
        self._wrong: str | None = None  # how the processes differ
        self._left: set[int] = set()  # who has ended, as agreed or not
        self._failed: int | None = None  # who says why all fail
        self._ends = False  # this process is about to leave, and says why
        self._is_forked = False
        self._change = threading.Condition()
        self._on_word: dict[str, Callable[[int, Any], None]] = {}

    # --- what all do together ------------------------------------------------------------------------------------------

    def gather(self, topic: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        """What each process gives to this topic, in their order; waits until all have.

        **Arguments:**

        - `topic`: a name. Each call with it is another gathering, and the processes make them in the same order; calls with
            different names may be made by several threads in any order.
        - `value`: what JSON holds.
        - `timeout`: seconds; None waits as long as the others live.

        Raises PeerError where one does not come in time.
        """
        if self.n == 1:
            return [json.loads(json.dumps(value))]
        return self.wait(self.give(topic, value), timeout)

    def give(self, topic: str, value: Any = None) -> str:
        """This process's part of a gathering, without waiting; returns its name, for `wait` and `answer`."""
        if self._is_forked:
            raise PeerError(
                "`Deployer`: expected a call from a process of the run, got one from a child that it has forked. "
                "Train, evaluate and save in the process that made the Deployer."
            )
        if self._is_forked:
            raise PeerError(
                "`Deployer`: expected a call from a process of the run, got one from a child that it has forked. "
                "Train, evaluate and save in the process that made the Deployer."
            )
        with self._change:
            self._asked[topic] += 1
            name = f"{topic} {self._asked[topic]}"
        if self.index == 0:
            self._take(0, name, value)
        else:
            self._send(0, "give", [name, value])
        return name

    def answer(self, name: str) -> list[Any] | None:
        """What all gave to the gathering of that name; None while some have not."""
        with self._change:
            return self._answers.get(name)

    def wait(self, name: str, timeout: float | None = None) -> list[Any]:
        """As `answer`, waiting for it."""
        with self._change:
            if not self._change.wait_for(lambda: name in self._answers, timeout):
                who = sorted(set(range(self.n)) - set(self._given.get(name, {}))) if self.index == 0 else "another process"
                raise PeerError(f"`{name}`: expected every process within {timeout:g} s, got none from {who}.")
            return self._answers.pop(name)

    def _take(self, index: int, name: str, value: Any) -> None:
        """At the hub: one process's part of a gathering; the last brings the answer to all."""
        with self._change:
            given = self._given.setdefault(name, {})
            given[index] = value
            is_whole = len(given) == self.n
            if is_whole:
                del self._given[name]
        if not is_whole:
            self._miss_those_who_left()
            return
        answer = json.loads(json.dumps([given[i] for i in range(self.n)]))  # the hub's own as the others get it
        for i in self._links:
            self._send(i, "answer", [name, answer])
        with self._change:  # last: this process may end with it, and the threads that answer with this process
            self._answers[name] = answer
            self._change.notify_all()

    def _miss_those_who_left(self) -> None:
        """At the hub: end the run where some wait for a process whose script has come to its end."""
        with self._change:
            missing = [i for i in sorted(self._left) if any(i not in given for given in self._given.values())]
        if missing and self._failed is None:
            self._end(f"process {missing[0]} of {self.n} has come to the end of its script, while others wait for it")

    def together(self, topic: str, act: Callable[[], Any], *, alone: bool = False) -> list[Any]:
        """What every process's `act()` returns (JSON), in their order; an OSError of one is raised by all, in one wording.

        **Arguments:**

        - `alone`: whether only process 0 acts; the others give None.
        """
        value = error = None
        if not alone or self.index == 0:
            try:
                value = act()
            except OSError as raised:
                error = raised
        given = [value, None if error is None else [error.errno, error.strerror or str(error), str(error.filename)]]
        found = self.gather(topic, given)
        if error is not None and self.n == 1:
            raise error
        for index, (_, problem) in enumerate(found):
            if problem is not None:
                raise OSError(problem[0], f"{problem[1]} (process {index})", problem[2]) from error
        return [value for value, _ in found]

    def agree(self, what: str, values: Mapping[str, Any], advice: str = _SAME_SCRIPT) -> None:
        """Check that every process gives the same values by name; waits until all have given theirs.

        Raises ValueError, the same in every process, that names the first field that differs.
        """
        if self.n > 1:
            difference = _difference(what, dict(enumerate(self.gather(f"agree on {what}", _plain(values)))), advice)
            if difference is not None:
                raise ValueError(difference)

    def decide(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """Process 0's values by name, in all processes; what follows from them is then the same everywhere.

        It warns, in process 0, where another process has other ones.
        """
        if self.n == 1:
            return values
        given = self.gather(f"decide {what}", values)
        if self.index == 0:
            difference = _difference(what, dict(enumerate(given)), "Process 0's decides: compute it from all the outputs.")
            if difference is not None:
                warnings.warn(difference, stacklevel=3)
        return given[0]

    def compare(self, topic: str, what: str, values: Mapping[str, Any], advice: str = _SAME_SCRIPT) -> None:
        """As `agree`, without waiting: where they differ, `check` raises it in every process once the hub has seen it.

        **Arguments:**

        - `topic`: of this comparison; each process uses it once.
        """
        plain = _plain(values)
        if self.index == 0:
            self._compare(0, topic, what, plain, advice)
        else:
            self._send(0, "compare", [topic, what, plain, advice])

    def _compare(self, index: int, topic: str, what: str, values: Any, advice: str) -> None:
        with self._change:
            given = self._compared.setdefault(topic, {})
            given[index] = values
            if len(given) == self.n:
                del self._compared[topic]
            self._wrong = self._wrong or _difference(what, given, advice)
        if self._wrong is not None:
            for i in self._links:
                self._send(i, "wrong", self._wrong)

    def check(self) -> None:
        """Raise ValueError where a comparison has found the processes to differ."""
        if self._wrong is not None:
            raise ValueError(self._wrong)

    def on(self, word: str, act: Callable[[int, Any], None]) -> None:
        """Call `act(index, value)`, from a thread, for what another process says with `say`."""
        self._on_word[word] = act

    def say(self, word: str, value: Any = None) -> None:
        """Tell every other process; nobody waits."""
        self._send(0, "say", [self.index, word, value]) if self.index else self._spread(0, word, value)

    def _spread(self, index: int, word: str, value: Any) -> None:
        for i in self._links:
            if i != index:
                self._send(i, "said", [index, word, value])

    @property
    def n_given(self) -> int:
        """How many gatherings this process has taken part in."""
        return self._asked.total()

    def meet(self, host: str, port: int, *, bind: str, timeout: float = START) -> None:
        """Wait until all processes are here, as `_rendezvous.meet` does, and listen to them from then on."""
        self._links = meet(self.n, self.index, host, port, bind=bind, timeout=timeout)
        for i, link in self._links.items():
            link.limit(self.heartbeat)
            threading.Thread(target=self._listen, args=(i, link), name=f"redeqx-peer-{i}", daemon=True).start()
        threading.Thread(target=self._beat, name="redeqx-beat", daemon=True).start()

    # --- the channel ---------------------------------------------------------------------------------------------------

    def _send(self, to: int, kind: str, value: Any = None) -> None:
        link = self._links.get(to)  # a forked child has none
        if link is not None:
            with contextlib.suppress(OSError):  # the thread that listens to it finds out
                link.send(kind, value)

    def _beat(self) -> None:
        while True:
            time.sleep(self.heartbeat / 5)
            for i in self._links:
                self._send(i, "beat")

    def _listen(self, index: int, link: Link) -> None:
        why = "its connection was closed"
        try:
            while True:
                self._hear(index, *link.receive())
        except TimeoutError:
            why = f"nothing was heard of it for {self.heartbeat:g} s"
        except (OSError, ValueError):
            pass
        self._lose(index, why)

    def _hear(self, index: int, kind: str, value: Any) -> None:
        if kind == "give":
            self._take(index, *value)
        elif kind == "compare":
            self._compare(index, *value)
        elif kind == "wrong":
            self._wrong = value
        elif kind == "answer":
            with self._change:
                self._answers[value[0]] = value[1]
                self._change.notify_all()
        elif kind == "say":
            self._spread(*value)
            self._act(*value)
        elif kind == "said":
            self._act(*value)
        elif kind == "bye":
            with self._change:
                self._left.add(index)
                self._change.notify_all()
            if self.index == 0:
                self._miss_those_who_left()
        elif kind == "fails":
            self._fails(index)
        elif kind == "failed":
            with self._change:
                self._failed = value
                self._change.notify_all()
            if value != self.index:
                _exit()
        elif kind == "lost":
            leave(value, self.committed)

    def _act(self, index: int, word: str, value: Any) -> None:
        if word in self._on_word:
            self._on_word[word](index, value)

    # --- ends ------------------------------------------------------------------------------------------------------------

    def _lose(self, index: int, why: str) -> None:
        """A connection has ended."""
        with self._change:
            expected = index in self._left or self._failed is not None
            self._left.add(index)
            self._change.notify_all()
        if not expected:
            self._end(f"process {index} of {self.n} is gone: {why}")

    def _end(self, why: str) -> None:
        """Leave, and tell all others to; where another thread is at it, that one is the first and says why."""
        with self._change:
            if self._ends:
                return
            self._ends = True
        for i in self._links:
            self._send(i, "lost", why)
        leave(why, self.committed)

    def fail(self) -> bool:
        """Say that this process fails, and let the others go first; whether it is the one to say why.

        Called where an exception ends the process, which then prints it: of several that fail at once, one prints.
        """
        if self.n == 1:
            return True
        if self.index == 0:
            self._fails(0)
        else:
            self._send(0, "fails")
        with self._change:
            self._change.wait_for(lambda: self._failed is not None, timeout=2)
            speaks = self._failed in (self.index, None)
        if speaks or self.index == 0:
            self._see_off()
        return speaks

    def _fails(self, speaker: int) -> None:
        """At the hub: a process fails; the first that does speaks for all."""
        with self._change:
            if self._failed is not None:
                return
            self._failed = speaker
            self._change.notify_all()
        for i in self._links:
            self._send(i, "failed", speaker)
        if speaker != 0:
            threading.Thread(target=self._leave_after_others, name="redeqx-farewell", daemon=True).start()

    def _leave_after_others(self) -> None:
        self._see_off()
        _exit()

    def _see_off(self) -> None:
        """Wait until the others have left, but for the one that speaks: the hub is the last of them."""
        with self._change:
            others = {0} if self.index else set(range(1, self.n)) - {self._failed}
            self._change.wait_for(lambda: others <= self._left, timeout=_FAREWELL if self.index else _FAREWELL / 2)

    def close(self) -> None:
        """Say goodbye: an end that is no failure."""
        for i in self._links:
            self._send(i, "bye")
        if self.index == 0 and self._links:
            with self._change:
                self._left.add(0)
            self._miss_those_who_left()

    def forget(self) -> None:
        """In a forked child, which is none of the run: it keeps no connection open, and nothing that it does is said."""
        links, self._links, self._is_forked = self._links, {}, True
        for link in links.values():
            link.close()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As another process gets them: a tuple is a list there."""
    return json.loads(json.dumps(dict(values), default=str))


def _difference(what: str, given: Mapping[int, Mapping[str, Any]], advice: str) -> str | None:
    """How the values of processes differ; None where they do not."""
    first = min(given)
    for name in dict.fromkeys(name for values in given.values() for name in values):
        expected = given[first].get(name)
        for index, values in sorted(given.items()):
            found = values.get(name)
            if found != expected and (found == found or expected == expected):  # two NaN are alike
                said = [json.dumps(value) if not isinstance(value, str) else value for value in (expected, found)]
                return (
                    f"`{what}`: expected `{name}` to be {said[0]}, as in process {first}, got {said[1]} in process {index}. "
                    f"{advice}"
                )
    return None


def leave(why: str, committed: int | None) -> NoReturn:
    """End this process at once, from any thread: code 75, and what is safe on disk in the last line."""
    safe = "no step was committed yet" if committed is None else f"the last committed step is {committed}"
    say(f"redeqx: {why}; {safe}. Leaving with exit code {EXIT_CODE}: run it again to go on.")
    _exit()


def _exit() -> NoReturn:
    # Not `sys.exit`: the main thread may be inside a collective that never ends, and JAX waits at exit for those gone.
    exit_now(EXIT_CODE)
