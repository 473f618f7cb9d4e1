"""Rows that calls and messages of a program read and write, on the device, in one upload a micro-batch.

A call of a kernel takes its queries and keys one behind the other. Where they lie so in the workspace they are a slice
of it; else they are copied together by a table of row numbers. A kernel on a GPU also takes the ends of its pieces. The
rows of a transfer group that are not adjacent are copied in one operation each way, too. All tables of a program are
one array, which is made where the program is made and copied to the device once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from balancing.sequences.engine.kernels import Pieces
from balancing.sequences.engine.program import Call, Messages, Rows, TransferGroup
from balancing.upload import upload

__all__ = ["CallRows", "DeviceRows", "MessageRows", "RowTable", "make_table", "rows_on_device"]

Index = slice | torch.Tensor  # of rows; int32 on the device
_ALIGNED = 4  # numbers; Triton compiles a kernel anew for pointers that are not multiples of 16 bytes


class CallRows(NamedTuple):
    """One call on a device.

    queries, keys: rows of the workspace.
    added: rows of keys by which gradients are added: (which of the call's keys, rows of the workspace) one after
        another, in each of which a row occurs once; None for all of the call's keys.
    pieces: with their ends on the device.
    merges: as in `Call`.
    """

    queries: Index
    keys: Index
    added: tuple[tuple[Index | None, Index], ...]
    pieces: Pieces
    merges: bool


class MessageRows(NamedTuple):
    """Rows of the messages of a transfer group on a device, one message behind another; None where there are none.

    sends: of `Messages.packed_sends`.
    receives: of `Messages.packed_receives`.
    added: rows to which what is received is added, each once; None where nothing is.
    terms: [term, row], which of what is received makes up the sum of a row, in order of peers, with the number of all
        for none; None where each row of `added` receives one.
    """

    sends: torch.Tensor | None
    receives: torch.Tensor | None
    added: Index | None
    terms: torch.Tensor | None


class DeviceRows(NamedTuple):
    """Rows of a program's calls, by number, and messages."""

    calls: list[CallRows]
    messages: dict[TransferGroup, MessageRows]


class _MessageParts(NamedTuple):
    """Places of a `MessageRows` in the array. adjacent: whether `added` is a range of rows itself."""

    sends: Rows | None
    receives: Rows | None
    added: Rows | None
    adjacent: bool
    terms: Rows | None


class RowTable(NamedTuple):
    """Tables of all calls and messages in one array. It can be pickled and compared.

    numbers: int32 [number], as bytes.
    parts: of each call, (start, stop) in `numbers` of its ends of queries and of keys, then of rows of queries, rows of
        keys and, in pairs, what is added; None where rows are adjacent or all.
    messages: of each transfer group with rows that are not adjacent.
    """

    numbers: bytes
    parts: tuple[tuple[Rows | None, ...], ...]
    messages: dict[TransferGroup, _MessageParts]


def make_table(calls: Sequence[Call], messages: Mapping[TransferGroup, Messages]) -> RowTable:
    """The table of a program's calls and of its messages, changes of layout included. Equal rows are there once."""
    arrays: list[np.ndarray] = []
    known: dict[tuple[Rows, ...], Rows] = {}
    size = 0

    def add(array: np.ndarray) -> Rows:
        nonlocal size
        start = size
        arrays.append(np.pad(array, (0, -len(array) % _ALIGNED)))
        size += len(arrays[-1])
        return start, start + len(array)

    def add_rows(ranges: tuple[Rows, ...]) -> Rows | None:
        if len(ranges) == 1:
            return None
        if ranges not in known:
            known[ranges] = add(_rows(ranges))
        return known[ranges]

    parts: list[tuple[Rows | None, ...]] = []
    for call in calls:
        ends = [add(np.cumsum((0, *lengths))) for lengths in (call.pieces.queries, call.pieces.keys)]
        own: list[Rows | None] = [*ends, add_rows(call.queries), add_rows(call.keys)]
        if len(call.keys) > 1:
            rows = _rows(call.keys)
            for which in _without_repeats(rows):
                all_keys = len(which) == len(rows)
                own += [None, own[3]] if all_keys else [add(which), add(rows[which])]
        parts.append(tuple(own))
    of_messages = {}
    for group, one in messages.items():
        sends, receives = (
            tuple(rows for message in packed for rows in message.rows)
            for packed in (one.packed_sends, one.packed_receives)
        )
        copied = added = terms = None
        if receives and not one.adds:
            copied = add(_rows(receives))
        elif len(receives) == 1:
            added = receives[0]
        elif receives:
            rows = _rows(receives)
            unique, where = np.unique(rows, return_inverse=True)
            parts_of_sums = list(_without_repeats(rows))
            table = np.full((len(parts_of_sums), len(unique)), len(rows))
            for term, which in enumerate(parts_of_sums):
                table[term, where[which]] = which
            if len(table) == 1:
                added = add(rows)
            else:
                added, terms = add(unique), add(table.ravel())
        if sends or receives:
            packed = add(_rows(sends)) if sends else None
            of_messages[group] = _MessageParts(packed, copied, added, len(receives) == 1, terms)
    numbers = np.concatenate([np.zeros(0, np.int32), *arrays]).astype(np.int32)
    return RowTable(numbers.tobytes(), tuple(parts), of_messages)


def rows_on_device(
    calls: Sequence[Call], table: RowTable, device: torch.device, more: np.ndarray | None = None
) -> tuple[DeviceRows, torch.Tensor]:
    """Calls and messages with their rows on `device`, and the numbers `more`, int32, which travel in the same copy."""
    own = np.frombuffer(table.numbers, np.int32)
    numbers = np.concatenate((own, np.zeros(0, np.int32) if more is None else more.astype(np.int32)))
    there = upload(numbers, device) if device.type == "cuda" else torch.as_tensor(numbers).to(device)
    views: dict[Rows, torch.Tensor] = {}

    def view(part: Rows) -> torch.Tensor:
        if part not in views:
            views[part] = there[part[0] : part[1]]
        return views[part]

    def rows(part: Rows | None, ranges: tuple[Rows, ...]) -> Index:
        return slice(*ranges[0]) if part is None else view(part)

    found = []
    for call, (query_ends, key_ends, queries, keys, *adds) in zip(calls, table.parts, strict=True):
        assert query_ends is not None and key_ends is not None
        pairs = [adds[at : at + 2] for at in range(0, len(adds), 2)] or [[None, None]]
        added = tuple((None if which is None else view(which), rows(into, call.keys)) for which, into in pairs)
        pieces = call.pieces._replace(ends=(view(query_ends), view(key_ends)))
        found.append(CallRows(rows(queries, call.queries), rows(keys, call.keys), added, pieces, call.merges))
    messages = {}
    for group, part in table.messages.items():
        sends, receives, listed, terms = (
            None if place is None else view(place)
            for place in (part.sends, part.receives, None if part.adjacent else part.added, part.terms)
        )
        into: Index | None = slice(*part.added) if part.adjacent and part.added is not None else listed
        if terms is not None and listed is not None:
            terms = terms.view(-1, len(listed))
        messages[group] = MessageRows(sends, receives, into, terms)
    return DeviceRows(found, messages), there[len(own) :]


def _rows(ranges: Sequence[Rows]) -> np.ndarray:
    """int64 [row] of ranges of rows."""
    start, stop = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    length = stop - start
    return np.repeat(start - (np.cumsum(length) - length), length) + np.arange(length.sum())


def _without_repeats(rows: np.ndarray) -> Iterable[np.ndarray]:
    """Positions in `rows`, divided so that no row occurs twice in a part: first occurrences, second ones, and so on."""
    order = np.argsort(rows, kind="stable")
    new = np.append(True, np.diff(rows[order]) != 0)
    first = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    occurrence = np.empty(len(rows), dtype=np.int64)
    occurrence[order] = np.arange(len(rows)) - first
    return (np.flatnonzero(occurrence == number) for number in range(int(occurrence.max(initial=-1)) + 1))
