"""Rows that calls and messages of a program read and write, on the device, in one upload a micro-batch.

A call of a kernel needs its queries adjacent and its keys adjacent. If they are adjacent in the workspace, the call
takes a slice of it; else a table of row numbers is used to copy them together. A kernel on a GPU also needs the ends of
its pieces. Rows that a transfer group sends are copied together in the same way. All tables of a program are one array,
which is made with the program and copied to the device once.

Gradients of a received key that no other rank adds to go from the call that computes them into the buffer in which they
are sent back. All others are summed in rows of their own, in wider numbers: those of the rank's own keys, of keys that
the rank has sent on to others, and of keys on rings.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from balancing.kernels.base import Pieces, piece_ends
from balancing.sequences.engine.program import Call, Messages, PeerRows, Rows, TransferGroup
from balancing.sequences.sequence_plan import join_adjacent
from balancing.upload import upload

__all__ = ["Added", "CallRows", "DeviceRows", "MessageRows", "RowTable", "make_table", "rows_of", "rows_on_device"]

Index = slice | torch.Tensor  # of rows; a tensor is int32 on the device
_ALIGNED = 4  # int32; Triton compiles a kernel anew for pointers that are not multiples of 16 bytes


class CallRows(NamedTuple):
    """One call on a device.

    queries, keys: rows of the workspace.
    gradients: where gradients of keys go.
    pieces: with their ends on the device.
    merges: as in `Call`.
    """

    queries: Index
    keys: Index
    gradients: tuple["Added", ...]
    pieces: Pieces
    merges: bool


class Added(NamedTuple):
    """Rows of one tensor to which rows of another are added.

    group: the tensor is the buffer that this transfer group sends; None: the sums of gradients.
    rows: to which is added; no row occurs twice.
    terms: for each of `rows` the rows of the other tensor that are summed, as `merging.add_rows` takes them.
    """

    group: TransferGroup | None
    rows: Index
    terms: torch.Tensor | None


class MessageRows(NamedTuple):
    """Rows of the messages of a transfer group on a device, message after message in the order of peers.

    sends: of the workspace, of the sums, or of the group's buffer if it has one.
    receives: a slice if received rows are adjacent in the workspace; else for each row, from the first, the position
        of the received row. Not used if received rows are added.
    added: of sums, the rows to which received rows are added. None if nothing is added.
    summed: of the group's buffer, the rows to which rows of the sums are added before it is sent. None without any.
    """

    sends: Index
    receives: Index
    added: Added | None
    summed: Added | None


class DeviceRows(NamedTuple):
    """Rows of a program's calls, in order, and of its messages."""

    calls: list[CallRows]
    messages: dict[TransferGroup, MessageRows]


class Place(NamedTuple):
    """Rows [start, stop), or if `listed`, the rows at positions [start, stop) of a table."""

    start: int
    stop: int
    listed: bool


class AddedPlaces(NamedTuple):
    """Places of an `Added`; None where it has None."""

    group: TransferGroup | None
    rows: Place
    terms: Place | None


class CallPlaces(NamedTuple):
    """Places of a `CallRows` and of the ends of its pieces."""

    query_ends: Place
    key_ends: Place
    queries: Place
    keys: Place
    gradients: tuple[AddedPlaces, ...]


class MessagePlaces(NamedTuple):
    """Places of a `MessageRows`; None where it has None."""

    sends: Place
    receives: Place
    added: AddedPlaces | None
    summed: AddedPlaces | None


class RowTable(NamedTuple):
    """Tables of all calls and messages in one array. It can be pickled and compared.

    numbers: the array, int32, as bytes.
    calls: places of each call.
    messages: places of each transfer group.
    sums: number of rows of sums; the rank's own tokens come first.
    direct: number of received rows that have no sums. Rows of rings, the last ones, are so many rows earlier in sums.
    """

    numbers: bytes
    calls: tuple[CallPlaces, ...]
    messages: dict[TransferGroup, MessagePlaces]
    sums: int
    direct: int


class _Numbers:
    """Builder of a table. Equal ranges of rows are listed once."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._known: dict[tuple[Rows, ...], Place] = {}
        self._size = 0

    def add(self, array: np.ndarray) -> Place:
        place = Place(self._size, self._size + len(array), True)
        self._arrays.append(np.pad(array, (0, -len(array) % _ALIGNED)))
        self._size += len(self._arrays[-1])
        return place

    def add_rows(self, ranges: Sequence[Rows]) -> Place:
        """The place of rows; several ranges are listed in the table."""
        joined = tuple(join_adjacent(ranges)) or ((0, 0),)
        if len(joined) == 1:
            return Place(*joined[0], False)
        if joined not in self._known:
            self._known[joined] = self.add(_rows(joined))
        return self._known[joined]

    def add_sums(self, group: TransferGroup | None, rows: np.ndarray, given: np.ndarray, number: int) -> AddedPlaces:
        """Places of an `Added`. rows: to which the rows `given` are added, of a tensor with `number` rows."""
        unique, where, times = np.unique(rows, return_inverse=True, return_counts=True)
        if len(unique) == number and (given == np.arange(number)).all():
            return AddedPlaces(group, self.add_rows(_ranges(rows)), None)
        order = np.argsort(rows, kind="stable")
        first = np.cumsum(times) - times
        occurrence = np.empty(len(rows), dtype=np.int64)
        occurrence[order] = np.arange(len(rows)) - first[where[order]]
        terms = np.full((times.max(), len(unique)), -1)
        terms[occurrence, where] = given
        return AddedPlaces(group, self.add_rows(_ranges(unique)), self.add(terms.ravel()))

    def to_bytes(self) -> bytes:
        return np.concatenate([np.zeros(0, np.int32), *self._arrays]).astype(np.int32).tobytes()


class _Gradients:
    """Where gradients of the rows of a workspace lie.

    row: int64 [row of the workspace], its row of sums; -1 without.
    group: int64 [row of the workspace], number of the transfer group in whose buffer the gradient lies; -1 in sums.
    place: int64 [row of the workspace], its row of that buffer.
    buffered: the transfer groups with a buffer.
    """

    def __init__(self, messages: Mapping[TransferGroup, Messages], rows: int) -> None:
        came = np.full(rows, -1)  # in which round of gathering a row is received
        for group, one in messages.items():
            if group.kind == "gather":
                came[_listed(one.receives)] = group.round
        self.buffered = [group for group in messages if group.kind == "return"]
        self.group, self.place = np.full((2, rows), -1)
        for number, group in enumerate(self.buffered):
            sent = _listed(messages[group].sends)
            # Where a round comes in between, other ranks return gradients of these keys in it.
            direct = came[sent] >= group.round
            self.group[sent[direct]], self.place[sent[direct]] = number, np.flatnonzero(direct)
        summed = self.group < 0
        self.row = np.where(summed, np.cumsum(summed) - 1, -1)
        self.sums = int(summed.sum())


def make_table(calls: Sequence[Call], messages: Mapping[TransferGroup, Messages], rows: int) -> RowTable:
    """The table of a program's calls and of its messages, changes of layout included. rows: of the workspace."""
    numbers, gradients = _Numbers(), _Gradients(messages, rows)
    of_calls = tuple(_call_places(call, numbers, gradients) for call in calls)
    of_messages = {group: _message_places(group, one, numbers, gradients) for group, one in messages.items()}
    return RowTable(numbers.to_bytes(), of_calls, of_messages, gradients.sums, rows - gradients.sums)


def _call_places(call: Call, numbers: _Numbers, gradients: _Gradients) -> CallPlaces:
    query_ends, key_ends = (numbers.add(piece_ends(part)) for part in (call.pieces.queries, call.pieces.keys))
    queries, keys = numbers.add_rows(call.queries), numbers.add_rows(call.keys)
    rows = _rows(call.keys)
    found = []
    for number in np.unique(gradients.group[rows]).tolist():
        given = np.flatnonzero(gradients.group[rows] == number)
        into = (gradients.row if number < 0 else gradients.place)[rows[given]]
        found.append(numbers.add_sums(None if number < 0 else gradients.buffered[number], into, given, len(rows)))
    return CallPlaces(query_ends, key_ends, queries, keys, tuple(found))


def _message_places(
    group: TransferGroup, messages: Messages, numbers: _Numbers, gradients: _Gradients
) -> MessagePlaces:
    nothing = Place(0, 0, False)
    if messages.adds:
        sent, received = gradients.row[_listed(messages.sends)], gradients.row[_listed(messages.receives)]
        added = numbers.add_sums(None, received, np.arange(len(received)), len(received)) if len(received) else None
        if group not in gradients.buffered:
            return MessagePlaces(numbers.add_rows(_ranges(sent)), nothing, added, None)
        places = np.flatnonzero(sent >= 0)
        summed = numbers.add_sums(group, places, sent[places], gradients.sums) if len(places) else None
        return MessagePlaces(Place(0, len(sent), False), nothing, added, summed)
    sends = numbers.add_rows([rows for message in messages.sends for rows in message.rows])
    joined = join_adjacent([rows for message in messages.receives for rows in message.rows])
    if len(joined) < 2:
        return MessagePlaces(sends, Place(*joined[0], False) if joined else nothing, None, None)
    return MessagePlaces(sends, numbers.add(np.argsort(_rows(joined))), None, None)


def _listed(messages: Sequence[PeerRows]) -> np.ndarray:
    """int64 [row], rows of messages one after another."""
    return _rows([rows for message in messages for rows in message.rows])


def rows_on_device(
    calls: Sequence[Call], table: RowTable, device: torch.device, more: Sequence[np.ndarray] = ()
) -> tuple[DeviceRows, list[torch.Tensor]]:
    """Calls and messages with their rows on `device`, and the arrays `more` on `device` as int32.

    more: arrays of whole numbers below 2^31, for the same copy.
    """
    indices = np.frombuffer(table.numbers, np.int32)
    numbers = np.concatenate((indices, *more)).astype(np.int32, copy=False)
    on_device = upload(numbers, device) if device.type == "cuda" else torch.as_tensor(numbers).to(device)
    on_device, *others = on_device.split([len(indices), *map(len, more)])
    views: dict[Place, torch.Tensor] = {}

    def listed(place: Place) -> torch.Tensor:
        if place not in views:
            views[place] = on_device[place.start : place.stop]
        return views[place]

    slices: dict[Place, slice] = {}  # equal rows are one object, by which the engine knows them

    def rows(place: Place) -> Index:
        return listed(place) if place.listed else slices.setdefault(place, slice(place.start, place.stop))

    def added(places: AddedPlaces) -> Added:
        group, into, terms = places
        return Added(group, rows(into), None if terms is None else listed(terms).view(-1, into.stop - into.start))

    call_rows = []
    for call, places in zip(calls, table.calls, strict=True):
        pieces = call.pieces._replace(ends=(listed(places.query_ends), listed(places.key_ends)))
        gradients = tuple(map(added, places.gradients))
        call_rows.append(CallRows(rows(places.queries), rows(places.keys), gradients, pieces, call.merges))
    messages = {
        transfer_group: MessageRows(
            rows(one.sends),
            rows(one.receives),
            None if one.added is None else added(one.added),
            None if one.summed is None else added(one.summed),
        )
        for transfer_group, one in table.messages.items()
    }
    return DeviceRows(call_rows, messages), others


def rows_of(tensor: torch.Tensor, rows: Index) -> torch.Tensor:
    """Rows of a tensor: adjacent ones in place, others copied."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _rows(ranges: Sequence[Rows]) -> np.ndarray:
    """int64 [row] of ranges of rows."""
    start, stop = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    length = stop - start
    return np.repeat(start - (np.cumsum(length) - length), length) + np.arange(length.sum())


def _ranges(rows: np.ndarray) -> list[Rows]:
    """Ranges of adjacent rows, in order."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts) if len(part)]
