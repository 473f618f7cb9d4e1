"""Rows that calls and messages of a program read and write, on the device, in one upload a micro-batch.

A call of a kernel needs its queries adjacent and its keys adjacent. If they are adjacent in the workspace, the call
takes a slice of it; else a table of row numbers is used to copy them together. A kernel on a GPU also needs the ends of
its pieces. Rows that a transfer group sends are copied together in the same way. All tables of a program are one array,
which is made with the program and copied to the device once.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from balancing.sequences.engine.kernels import Pieces, piece_ends
from balancing.sequences.engine.program import Call, Messages, Rows, TransferGroup
from balancing.sequences.sequence_plan import join_adjacent
from balancing.upload import upload

__all__ = ["CallRows", "DeviceRows", "MessageRows", "RowTable", "make_table", "rows_of", "rows_on_device"]

Index = slice | torch.Tensor  # of rows; a tensor is int32 on the device
_ALIGNED = 4  # int32; Triton compiles a kernel anew for pointers that are not multiples of 16 bytes


class CallRows(NamedTuple):
    """One call on a device.

    queries, keys: rows of the workspace.
    added: rows of the workspace to which gradients of keys are added; no row occurs twice.
    terms: for each row of `added` the keys of the call whose gradients are summed, as `merging.add_rows` takes them.
    pieces: with their ends on the device.
    merges: as in `Call`.
    """

    queries: Index
    keys: Index
    added: Index
    terms: torch.Tensor | None
    pieces: Pieces
    merges: bool


class MessageRows(NamedTuple):
    """Rows of the messages of a transfer group on a device, message after message in the order of peers.

    sends: of the workspace.
    receives: a slice if received rows are adjacent in the workspace; else for each row, from the first, the position
        of the received row. Not used if received rows are added.
    added: rows to which received rows are added; no row occurs twice. None if nothing is added.
    terms: for each row of `added` the received rows to sum, in order of peers, as `merging.add_rows` takes them.
    """

    sends: Index
    receives: Index
    added: Index | None
    terms: torch.Tensor | None


class DeviceRows(NamedTuple):
    """Rows of a program's calls, in order, and of its messages."""

    calls: list[CallRows]
    messages: dict[TransferGroup, MessageRows]


class Place(NamedTuple):
    """Rows [start, stop), or if `listed`, the rows at positions [start, stop) of a table."""

    start: int
    stop: int
    listed: bool


class CallPlaces(NamedTuple):
    """Places of a `CallRows` and of the ends of its pieces."""

    query_ends: Place
    key_ends: Place
    queries: Place
    keys: Place
    added: Place
    terms: Place | None


class MessagePlaces(NamedTuple):
    """Places of a `MessageRows`; None where it has None."""

    sends: Place
    receives: Place
    added: Place | None
    terms: Place | None


class RowTable(NamedTuple):
    """Tables of all calls and messages in one array. It can be pickled and compared.

    numbers: the array, int32, as bytes.
    calls: places of each call.
    messages: places of each transfer group.
    """

    numbers: bytes
    calls: tuple[CallPlaces, ...]
    messages: dict[TransferGroup, MessagePlaces]


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

    def add_sums(self, ranges: Sequence[Rows]) -> tuple[Place, Place | None]:
        """Places of the rows to which one row for each of `ranges` is added, and of the terms of each sum."""
        rows = _rows(ranges)
        unique, where, times = np.unique(rows, return_inverse=True, return_counts=True)
        if len(unique) == len(rows):
            return self.add_rows(ranges), None
        order = np.argsort(rows, kind="stable")
        first = np.cumsum(times) - times
        occurrence = np.empty(len(rows), dtype=np.int64)
        occurrence[order] = np.arange(len(rows)) - first[where[order]]
        terms = np.full((times.max(), len(unique)), -1)
        terms[occurrence, where] = np.arange(len(rows))
        return self.add_rows(_ranges(unique)), self.add(terms.ravel())

    def to_bytes(self) -> bytes:
        return np.concatenate([np.zeros(0, np.int32), *self._arrays]).astype(np.int32).tobytes()


def make_table(calls: Sequence[Call], messages: Mapping[TransferGroup, Messages]) -> RowTable:
    """The table of a program's calls and of its messages, changes of layout included."""
    numbers = _Numbers()
    call_places = tuple(_call_places(call, numbers) for call in calls)
    message_places = {group: _message_places(messages[group], numbers) for group in messages}
    return RowTable(numbers.to_bytes(), call_places, message_places)


def _call_places(call: Call, numbers: _Numbers) -> CallPlaces:
    query_ends, key_ends = (numbers.add(piece_ends(part)) for part in (call.pieces.queries, call.pieces.keys))
    queries, keys = numbers.add_rows(call.queries), numbers.add_rows(call.keys)
    return CallPlaces(query_ends, key_ends, queries, keys, *numbers.add_sums(call.keys))


def _message_places(messages: Messages, numbers: _Numbers) -> MessagePlaces:
    sent, received = (
        [rows for message in side for rows in message.rows] for side in (messages.sends, messages.receives)
    )
    sends, nothing = numbers.add_rows(sent), Place(0, 0, False)
    if messages.adds:
        return MessagePlaces(sends, nothing, *(numbers.add_sums(received) if received else (None, None)))
    joined = join_adjacent(received)
    if len(joined) < 2:
        return MessagePlaces(sends, Place(*joined[0], False) if joined else nothing, None, None)
    return MessagePlaces(sends, numbers.add(np.argsort(_rows(joined))), None, None)


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

    def rows(place: Place) -> Index:
        return listed(place) if place.listed else slice(place.start, place.stop)

    def terms_of(added: Place | None, terms: Place | None) -> torch.Tensor | None:
        return None if added is None or terms is None else listed(terms).view(-1, added.stop - added.start)

    call_rows = []
    for call, places in zip(calls, table.calls, strict=True):
        pieces = call.pieces._replace(ends=(listed(places.query_ends), listed(places.key_ends)))
        queries, keys = rows(places.queries), rows(places.keys)
        terms = terms_of(places.added, places.terms)
        call_rows.append(CallRows(queries, keys, rows(places.added), terms, pieces, call.merges))
    messages = {
        transfer_group: MessageRows(
            rows(one.sends),
            rows(one.receives),
            None if one.added is None else rows(one.added),
            terms_of(one.added, one.terms),
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
    """Ranges of ascending rows."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts)]
