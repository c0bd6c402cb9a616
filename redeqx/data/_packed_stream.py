"""`pack`, and the packed rows of an iterable in bounded memory, with a state from which a later run goes on.

Owns what is read ahead of a row. `_packing` chooses the sequences of a row and makes it; `_streams` resumes the iterable.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from ..errors import check_count, filter_traceback
from ._examples import check_examples, is_function, size_of
from ._packing import PackedRows, Piece, RowFormat, Waiting, check_same_arrays
from ._streams import Stream

_LEAST_ROWS = 2  # that the waiting sequences fill: many short ones are needed for a long row


@overload
def pack(
    examples: Sequence[Any], length: int | Mapping[str, int], *, cut_long: bool = False, n_waiting: int = 256
) -> PackedRows: ...
@overload
def pack(
    examples: Iterable[Any], length: int | Mapping[str, int], *, cut_long: bool = False, n_waiting: int = 256
) -> "PackedStream": ...
@filter_traceback
def pack(
    examples: Any, length: int | Mapping[str, int], *, cut_long: bool = False, n_waiting: int = 256
) -> "PackedRows | PackedStream":
    """Packs sequences of tokens into rows of a fixed length, several in each, so that few of their tokens are padding.

    Each row takes the sequence that has waited longest, and then the longest ones that still fit. Equal examples give equal
    rows. A row is a dict of arrays `[length]`:

    - `tokens`: int32, the sequences one after another; 0 for padding;
    - `segments`: int32, the number of the sequence that a token belongs to, from 1 in each row; 0 for padding;
    - `positions`: int32, the position of a token in its sequence;
    - `labels`: int32, the token that follows in the same sequence; -100 for its last token and for padding.

    ```python
    rows = pack([[5, 6, 7], [8, 9], [3]], 4)
    rows[0]["tokens"], rows[0]["segments"]  # [5, 6, 7, 3], [1, 1, 1, 2]
    ```

    **Arguments:**

    - `examples`: an object with `len()` and integer items, or an iterable. An example is a sequence of token ids, or a dict
        of `tokens` and other numbers per token, which are packed alike, such as `labels` of your own. An example without
        tokens takes no place.
    - `length`: the length of a row, in tokens. A dict of lengths packs sequences that belong together, such as a source and
        a target: an example is then a dict of one sequence per name, a row is a dict of rows, and the segments of one
        example have the same number.
    - `cut_long`: whether an example longer than `length` is cut into pieces of `length` tokens, each a segment of its own.
        No token is lost: the label of a piece's last token is the first token of the next piece.
    - `n_waiting`: the number of sequences of an iterable that are read ahead, to choose from; more if those would not fill
        two rows. Examples with `len()` are all read by this call, for their lengths; those of a row again when it is read.

    Returns an object with `len()` and integer items for `examples` that have them, else an iterable. The state of its
    iterators (`state_dict`, `load_state_dict`) is that of the iterable and the numbers of the examples that wait.

    Raises ValueError for an example that is longer than `length` without `cut_long`, and TypeError for examples that are not
    flat arrays of numbers; of an iterable when they are read.
    """
    row_format = RowFormat.of(length, cut_long)
    check_count(n_waiting, "n_waiting")
    if is_function(examples):
        raise TypeError(
            "`examples`: expected examples, got a function of the epoch. Pack in the function: "
            "`lambda epoch: pack(examples(epoch), length)`."
        )
    check_examples(examples, "examples")
    if size_of(examples) is None:
        return PackedStream(examples, row_format, int(n_waiting))
    return PackedRows(examples, row_format)


class PackedStream(Iterable[Any]):
    """The packed rows of an iterable; see `pack`."""

    def __init__(self, examples: Any, row_format: RowFormat, n_waiting: int):
        self._examples, self._format, self._n_waiting = examples, row_format, n_waiting

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self._examples, self._format, self._n_waiting)

    @property
    def set_epoch(self) -> Any:
        """The method of the iterable. A property, so that rows have it only if the iterable does."""
        return self._examples.set_epoch


def source_of(examples: Any) -> Any:
    """Returns what these examples are read from: the iterable of packed rows, and other examples themselves."""
    return examples._examples if isinstance(examples, PackedStream) else examples


class PackedIterator(Iterator[Any]):
    """One pass over the rows. A row may need an example that was read long before. Its state therefore holds no examples: it
    is the state of the iterable before the oldest waiting example, and which of the examples since then wait."""

    def __init__(self, examples: Any, row_format: RowFormat, n_waiting: int):
        self._given, self._format, self._n_waiting = examples, row_format, n_waiting
        self._start(0, None)

    def _start(self, position: int, saved: Any) -> None:
        """Goes to the example at a position of the iterable, with nothing read ahead."""
        self._source = Stream(self._given, position, saved, "examples")
        self._n_read = position
        self._states = deque([(position, saved)])  # of the iterable, the last one before the oldest waiting example first
        self._waiting = Waiting(tuple(self._format.lengths.values()))
        self._read: dict[int, tuple[int, Any]] = {}  # of each example that waits: the number of its pieces, and its arrays
        self._names: dict[Any, list[str]] = {}

    def __next__(self) -> Any:
        if self._n_read > self._states[-1][0]:
            self._states.append((self._n_read, self._source.state()))
        while (len(self._waiting) < self._n_waiting or self._waiting.n_rows < _LEAST_ROWS) and self._read_one():
            pass
        if not self._waiting:
            raise StopIteration
        pieces = self._waiting.take_row()
        row = self._format.row([(start, self._read[number][1]) for number, start in pieces])
        for number, _ in pieces:
            n_pieces, sides = self._read.pop(number)
            if n_pieces > 1:
                self._read[number] = n_pieces - 1, sides
        oldest = next(iter(self._waiting), (self._n_read, 0))[0]
        while len(self._states) > 1 and self._states[1][0] <= oldest:
            self._states.popleft()
        return row

    def _read_one(self, only: set[Piece] | None = None) -> bool:
        """Reads an example, whose pieces then wait; of them `only` these if given. Returns False at the end."""
        number = self._n_read
        for example in self._source:
            self._n_read += 1
            sides = self._format.read(example, number)
            check_same_arrays(self._names, sides, number)
            pieces = [each for each in self._format.pieces(sides, number) if only is None or each[0] in only]
            for piece, size in pieces:
                self._waiting.add(piece, size)
            if pieces:
                self._read[number] = len(pieces), sides
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last row, of numbers, texts, lists and dicts."""
        position, state = self._states[0]
        waiting = [[number - position, start] for number, start in self._waiting]
        return {"position": position, "state": state, "n_read": self._n_read - position, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the row at which a state was taken. The examples that waited are read again."""
        position = state["position"]
        self._start(position, state["state"])
        only = {(position + number, start) for number, start in state["waiting"]}
        for _ in range(state["n_read"]):
            if not self._read_one(only):
                break
