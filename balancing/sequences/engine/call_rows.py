"""Rows that calls and messages of a program read and write, on the device, in one upload a micro-batch.

A call of a kernel needs its queries adjacent and its keys adjacent. If they are adjacent in the workspace, the call
takes a slice of it; else a table of row numbers is used to copy them together. A kernel on a GPU also needs the ends of
its pieces. Rows of a transfer group that are not adjacent are copied in one operation for sending and one for
receiving. All tables of a program are one array, which is made with the program and copied to the device once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from balancing.sequences.engine.kernels import Pieces, piece_ends
from balancing.sequences.engine.program import Call, Messages, Rows, TransferGroup
from balancing.upload import upload

__all__ = ["CallRows", "DeviceRows", "MessageRows", "RowTable", "make_table", "rows_on_device"]

Index = slice | torch.Tensor  # of rows; a tensor is int32 on the device
_ALIGNED = 4  # int32; Triton compiles a kernel anew for pointers that are not multiples of 16 bytes


class CallRows(NamedTuple):
    """One call on a device.

    queries, keys: rows of the workspace.
    added: how gradients of keys are added to the workspace, one operation for each (which of the call's keys, rows of
        the workspace). `which` is None for all keys of the call. No row occurs twice in an operation.
    pieces: with their ends on the device.
    merges: as in `Call`.
    """

    queries: Index
    keys: Index
    added: tuple[tuple[Index | None, Index], ...]
    pieces: Pieces
    merges: bool


class MessageRows(NamedTuple):
    """Rows of the messages of a transfer group on a device, message after message; None where there are no rows.

    sends: of `Messages.packed_sends`.
    receives: of `Messages.packed_receives`.
    added: rows to which received rows are added; no row occurs twice. None if nothing is added.
    terms: [term, row], for each row of `added` the received rows to sum, in order of peers. The number of all received
        rows stands for no further term. None if each row of `added` receives one term.
    """

    sends: torch.Tensor | None
    receives: torch.Tensor | None
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
    """Places of a `CallRows` and of the ends of its pieces. In `added`, None is all of the call's keys."""

    query_ends: Place
    key_ends: Place
    queries: Place
    keys: Place
    added: tuple[tuple[Place | None, Place], ...]


class MessagePlaces(NamedTuple):
    """Places of a `MessageRows`; None where it has None."""

    sends: Place | None
    receives: Place | None
    added: Place | None
    terms: Place | None


class RowTable(NamedTuple):
    """Tables of all calls and messages in one array. It can be pickled and compared.

    numbers: the array, int32, as bytes.
    calls: places of each call.
    messages: places of each transfer group with rows that are not adjacent.
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

    def add_rows(self, ranges: tuple[Rows, ...]) -> Place:
        """The place of rows; several ranges are listed in the table."""
        if len(ranges) == 1:
            return Place(*ranges[0], False)
        if ranges not in self._known:
            self._known[ranges] = self.add(_rows(ranges))
        return self._known[ranges]

    def to_bytes(self) -> bytes:
        return np.concatenate([np.zeros(0, np.int32), *self._arrays]).astype(np.int32).tobytes()


def make_table(calls: Sequence[Call], messages: Mapping[TransferGroup, Messages]) -> RowTable:
    """The table of a program's calls and of its messages, changes of layout included."""
    numbers = _Numbers()
    of_calls = tuple(_call_places(call, numbers) for call in calls)
    of_messages = {
        transfer_group: found for transfer_group, one in messages.items() if (found := _message_places(one, numbers))
    }
    return RowTable(numbers.to_bytes(), of_calls, of_messages)


def _call_places(call: Call, numbers: _Numbers) -> CallPlaces:
    query_ends, key_ends = (numbers.add(piece_ends(part)) for part in (call.pieces.queries, call.pieces.keys))
    queries, keys = numbers.add_rows(call.queries), numbers.add_rows(call.keys)
    if not keys.listed:
        return CallPlaces(query_ends, key_ends, queries, keys, ((None, keys),))
    rows = _rows(call.keys)
    added = tuple(
        (None, keys) if len(which) == len(rows) else (numbers.add(which), numbers.add(rows[which]))
        for which in _without_repeats(rows)
    )
    return CallPlaces(query_ends, key_ends, queries, keys, added)


def _message_places(messages: Messages, numbers: _Numbers) -> MessagePlaces | None:
    sends, receives = (
        tuple(rows for message in packed for rows in message.rows)
        for packed in (messages.packed_sends, messages.packed_receives)
    )
    if not sends and not receives:
        return None
    copied = added = terms = None
    if receives and not messages.adds:
        copied = numbers.add(_rows(receives))
    elif len(receives) == 1:
        added = Place(*receives[0], False)
    elif receives:
        rows = _rows(receives)
        unique, where = np.unique(rows, return_inverse=True)
        parts_of_sums = list(_without_repeats(rows))
        table = np.full((len(parts_of_sums), len(unique)), len(rows))
        for term, which in enumerate(parts_of_sums):
            table[term, where[which]] = which
        if len(table) == 1:
            added = numbers.add(rows)
        else:
            added, terms = numbers.add(unique), numbers.add(table.ravel())
    return MessagePlaces(numbers.add(_rows(sends)) if sends else None, copied, added, terms)


def rows_on_device(
    calls: Sequence[Call], table: RowTable, device: torch.device, more: Sequence[np.ndarray] = ()
) -> tuple[DeviceRows, list[torch.Tensor]]:
    """Calls and messages with their rows on `device`, and the arrays `more` on `device` as int32.

    more: arrays of whole numbers below 2^31, for the same copy.
    """
    of_table = np.frombuffer(table.numbers, np.int32)
    numbers = np.concatenate((of_table, *more)).astype(np.int32, copy=False)
    on_device = upload(numbers, device) if device.type == "cuda" else torch.as_tensor(numbers).to(device)
    of_table, *others = on_device.split([len(of_table), *map(len, more)])
    views: dict[Place, torch.Tensor] = {}

    def listed(place: Place) -> torch.Tensor:
        if place not in views:
            views[place] = of_table[place.start : place.stop]
        return views[place]

    def rows(place: Place) -> Index:
        return listed(place) if place.listed else slice(place.start, place.stop)

    found = []
    for call, places in zip(calls, table.calls, strict=True):
        pieces = call.pieces._replace(ends=(listed(places.query_ends), listed(places.key_ends)))
        added = tuple((None if which is None else rows(which), rows(into)) for which, into in places.added)
        found.append(CallRows(rows(places.queries), rows(places.keys), added, pieces, call.merges))
    messages = {}
    for transfer_group, of_group in table.messages.items():
        sends, receives, terms = (
            None if place is None else listed(place) for place in (of_group.sends, of_group.receives, of_group.terms)
        )
        into = None if of_group.added is None else rows(of_group.added)
        if terms is not None and isinstance(into, torch.Tensor):
            terms = terms.view(-1, len(into))
        messages[transfer_group] = MessageRows(sends, receives, into, terms)
    return DeviceRows(found, messages), others


def _rows(ranges: Sequence[Rows]) -> np.ndarray:
    """int64 [row] of ranges of rows."""
    start, stop = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    length = stop - start
    return np.repeat(start - (np.cumsum(length) - length), length) + np.arange(length.sum())


def _without_repeats(rows: np.ndarray) -> Iterable[np.ndarray]:
    """Positions in `rows`, divided into parts without repeated rows: first occurrences, second ones, and so on."""
    order = np.argsort(rows, kind="stable")
    new = np.append(True, np.diff(rows[order]) != 0)
    first = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    occurrence = np.empty(len(rows), dtype=np.int64)
    occurrence[order] = np.arange(len(rows)) - first
    return (np.flatnonzero(occurrence == number) for number in range(int(occurrence.max(initial=-1)) + 1))
