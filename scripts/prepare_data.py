#!/usr/bin/env python3
"""Tokenize text into the .bin/.idx pair that Megatron trains on.

The text is a folder of files (each file is a document), a JSONL file (each line is a document), or the source of the
Python standard library on this machine: real text with heavy-tailed document lengths that needs no download.

    python scripts/prepare_data.py --input notes/ --glob '*.md' --append-eod --output-prefix runs/notes
    python scripts/prepare_data.py --input web.jsonl --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2 \\
        --workers 16 --append-eod --output-prefix runs/web
    python scripts/prepare_data.py --stdlib --append-eod --output-prefix runs/stdlib

With --functions each function of a Python file is a document: many short ones and a few long ones, so that a training
sample of some thousand tokens has several.

The output does not depend on the number of workers. It appears under its name only when it is complete.
"""

import argparse
import ast
import fnmatch
import io
import json
import logging
import os
import signal
import sys
import sysconfig
import textwrap
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from balancing.command_line import Parser, whole_number
from balancing.files import output
from megatron.balanced.cpu.packages import hide_packages

BYTE_LEVEL = "ByteLevelTokenizer"
# The 256 byte values, then two tokens that no text can contain.
END_OF_DOCUMENT, PADDING, BYTE_LEVEL_VOCABULARY = 256, 257, 258

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 256
_ENDS = (signal.SIGINT, signal.SIGTERM)
BATCHES_IN_FLIGHT = 4  # per worker: bounds the memory, however large the corpus is

# Tests are left out because some distributions of Python package them apart.
NOT_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idle_test")


@dataclass(frozen=True)
class Batch:
    """Documents that one worker tokenizes at once: whole files, or numbered lines of one JSONL file."""

    file: Path | None
    documents: list[Path] | list[tuple[int, bytes]]
    bytes: int


@dataclass(frozen=True)
class Tokens:
    """A batch's documents, an array each; the number of empty ones, which are left out; of those not all UTF-8."""

    documents: list[np.ndarray]
    empty: int
    repaired: int


class Tokenize:
    """Tokenizes a batch. Every worker has one."""

    def __init__(
        self, tokenizer: Any, json_key: str, dtype: type, end_of_document: int | None, functions: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.json_key = json_key
        self.functions = functions  # each of a file's Python functions is a document, not the file
        self.dtype = dtype
        self.end = [] if end_of_document is None else [end_of_document]

    def __call__(self, batch: Batch) -> Tokens:
        documents, empty, repaired = [], 0, 0
        for document in batch.documents:
            if isinstance(document, Path):
                text, intact = _file_text(document)
                repaired += not intact
                texts = _functions(document, text) if self.functions else [text]
            else:
                texts = [_line_text(batch.file, *document, self.json_key)]
            for text in texts:
                ids = list(self.tokenizer.tokenize(text)) if text else []
                if ids:
                    documents.append(np.array(ids + self.end, dtype=self.dtype))
                else:
                    empty += 1
        return Tokens(documents, empty, repaired)


def _file_text(path: Path) -> tuple[str, bool]:
    data = path.read_bytes()
    try:
        return data.decode("utf-8"), True
    except UnicodeDecodeError:
        return data.decode("utf-8", errors="replace"), False


class _Functions(ast.NodeVisitor):
    """Collects the first and last line of each outermost function, decorators included."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        assert node.end_lineno is not None
        self.lines.append((min([node, *node.decorator_list], key=lambda each: each.lineno).lineno, node.end_lineno))

    visit_AsyncFunctionDef = visit_FunctionDef


def _functions(path: Path, text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not Python source ({error}); leave --functions out, or the file") from None
    found = _Functions()
    found.visit(tree)
    lines = list(io.StringIO(text, newline=None))  # str.splitlines also cuts at form feeds, the parser does not
    return [textwrap.dedent("".join(lines[first - 1 : last])) for first, last in found.lines]


def _line_text(file: Path | None, number: int, line: bytes, key: str) -> str:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); a file given to --input must be JSONL") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object but a {type(record).__name__}")
    if key not in record:
        raise ValueError(f"{where} has no key {key!r}, only {sorted(record)}; name the right one with --json-key")
    if not isinstance(record[key], str):
        raise ValueError(f"{where}: {key!r} is not text but a {type(record[key]).__name__}")
    return record[key]


def find_files(folder: Path, globs: list[str], leave_out: tuple[str, ...] = ()) -> list[Path]:
    """All files under `folder` whose name matches one of `globs`, sorted. Folders named in `leave_out` are skipped.

    Raises OSError for a folder that cannot be read, ValueError if nothing matches.
    """

    def stop(error: OSError) -> NoReturn:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in leave_out]
        found += [Path(parent, name) for name in names if any(fnmatch.fnmatch(name, glob) for glob in globs)]
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise ValueError(f"no file under {folder} matches {' or '.join(globs)}; name others with --glob")
    return files


def _batches(file: Path | None, documents: Iterator[tuple[Any, int]]) -> Iterator[Batch]:
    batch: list[Any] = []
    size = 0
    for document, document_size in documents:
        batch.append(document)
        size += document_size
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield Batch(file, batch, size)
            batch, size = [], 0
    if batch:
        yield Batch(file, batch, size)


def read_corpus(args: argparse.Namespace) -> tuple[Iterator[Batch], int]:
    """The corpus in batches, ordered by the names of files alone, and its size in bytes."""
    if args.stdlib:
        inputs, globs, leave_out = [Path(sysconfig.get_path("stdlib"))], ["*.py"], NOT_STDLIB
    else:
        inputs, globs, leave_out = args.input, args.glob, ()
    # Folders are listed before anything is written, so that a wrong path costs no time.
    sources = [find_files(path, globs, leave_out) if path.is_dir() else path for path in inputs]
    size = sum(path.stat().st_size for source in sources for path in (source if isinstance(source, list) else [source]))

    def batches() -> Iterator[Batch]:
        for source in sources:
            if isinstance(source, list):
                yield from _batches(None, ((path, path.stat().st_size) for path in source))
                continue
            with source.open("rb") as lines:
                numbered = enumerate(lines, start=1)
                yield from _batches(source, ((each, len(each[1])) for each in numbered if not each[1].isspace()))

    return batches(), size


@contextmanager
def _ends_later() -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM wait. If they came while workers start, the pool would not know all of its
    workers, and the exit would wait for these for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_worker(task: Tokenize) -> None:
    global _task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C, and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    _task = task


def _work(batch: Batch) -> Tokens:
    return _task(batch)


def tokenize_all(task: Tokenize, batches: Iterator[Batch], workers: int) -> Iterator[tuple[Batch, Tokens]]:
    """Each batch with its tokens, in the order of `batches`, computed by `workers` processes."""
    if workers == 1:
        for batch in batches:
            yield batch, task(batch)
        return
    # Forked workers have the tokenizer from the start; importing Megatron again would take seconds in each of them.
    pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=_become_worker, initargs=(task,))
    waiting: deque[tuple[Batch, Future[Tokens]]] = deque()
    try:
        for batch in batches:
            with _ends_later():
                waiting.append((batch, pool.submit(_work, batch)))
            if len(waiting) > workers * BATCHES_IN_FLIGHT:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool:
        raise ValueError("a worker was killed, probably because memory ran out; try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def build_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer that the flags ask for. Raises ValueError if it cannot be built."""
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build

    if args.tokenizer_type == BYTE_LEVEL:
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "byte-level"},
            vocab_size=256,
            special_tokens=["<pad>", "<eod>"],
            _eos_id=END_OF_DOCUMENT,
            _pad_id=PADDING,
        )
    args.pad_vocab_size = False  # depends on the model's layout, which is not known here
    try:
        return build(args)
    except Exception as error:  # each tokenizer library fails in its own way
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = "check --tokenizer-model, or install its library with pip install -e '.[tokenizers]'"
        raise ValueError(f"{args.tokenizer_type} cannot be built: {reason}; {hint}") from None


def write(args: argparse.Namespace) -> None:
    """Read the corpus, tokenize it and write PREFIX.bin and PREFIX.idx. Raises ValueError or OSError."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    if os.path.basename(args.output_prefix) in ("", ".", ".."):
        raise ValueError(
            f"--output-prefix {args.output_prefix} names a folder; add the beginning of the file names, as in "
            f"{os.path.join(args.output_prefix, 'corpus')}"
        )
    target = [Path(f"{args.output_prefix}{end}") for end in (".bin", ".idx")]
    if there := [str(path) for path in target if path.exists() and not args.overwrite]:
        raise ValueError(f"{' and '.join(there)} already there; replace with --overwrite, or change --output-prefix")

    batches, size = read_corpus(args)
    tokenizer = build_tokenizer(args)
    end_of_document = None
    if args.append_eod:
        with suppress(AttributeError, NotImplementedError):
            end_of_document = tokenizer.eod
        if end_of_document is None:
            raise ValueError(f"{args.tokenizer_type} has no end-of-document token; leave --append-eod out")

    target[0].parent.mkdir(parents=True, exist_ok=True)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    task = Tokenize(tokenizer, args.json_key, dtype, end_of_document, args.functions)
    empty = repaired = 0
    inputs = args.input or []
    # Megatron needs the pair: if the process stops between the two files, there is no .idx rather than a wrong one.
    with output(target[1], inputs) as index, output(target[0], inputs) as data:
        builder = IndexedDatasetBuilder(data.name, dtype=dtype)
        try:
            # No refresh from a thread of its own: it could hold a lock while workers are forked.
            with _progress_bar() as bar, closing(tokenize_all(task, batches, args.workers)) as results:
                progress = bar.add_task("", total=size)
                for batch, tokens in results:
                    for document in tokens.documents:
                        builder.add_document(document, [len(document)])
                    empty += tokens.empty
                    repaired += tokens.repaired
                    bar.update(progress, advance=batch.bytes, refresh=True)
            if not builder.sequence_lengths:
                raise ValueError(f"the corpus is empty: {empty} documents, and no text in any of them")
            builder.finalize(index.name)
            target[1].unlink(missing_ok=True)
        finally:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                builder.data_file.close()

    _summarize(args, np.array(builder.sequence_lengths), empty, repaired)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("Tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        auto_refresh=False,
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )


def _summarize(args: argparse.Namespace, lengths: np.ndarray, empty: int, repaired: int) -> None:
    print(
        f"{args.output_prefix}.bin and .idx: {len(lengths):,} documents, {lengths.sum():,} tokens; per document: "
        f"median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f}, 99th percentile "
        f"{np.percentile(lengths, 99):,.0f}, longest {lengths.max():,}"
    )
    if empty:
        print(f"Left out as empty: {empty:,} documents")
    if repaired:
        print(f"Not UTF-8, their undecodable bytes now U+FFFD: {repaired:,} files")
    if args.tokenizer_type == BYTE_LEVEL:
        # Megatron has no flag for its byte-level tokenizer. Training needs only its size and its two special tokens.
        print(
            f"Train on it with --data-path {args.output_prefix} --tokenizer-type NullTokenizer "
            f"--vocab-size {BYTE_LEVEL_VOCABULARY} --null-tokenizer-eod-id {END_OF_DOCUMENT} "
            f"--null-tokenizer-pad-id {PADDING}"
        )


def build_parser() -> Parser:
    """Our flags, and Megatron's own for tokenizers."""
    from megatron.core.tokenizers.utils.build_tokenizer import SUPPORTED_TOKENIZERS
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    # Left out: those for images and conversations, which are not text.
    others = [name for name in SUPPORTED_TOKENIZERS if "Multimodal" not in name and "SFT" not in name]
    parser = Parser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # our --tokenizer-type replaces Megatron's
        allow_abbrev=False,
    )
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--input", type=Path, nargs="+", metavar="PATH", help="folders of text, or JSONL files")
    corpus.add_argument("--stdlib", action="store_true", help="the Python standard library's source on this machine")
    add = parser.add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    add("--glob", nargs="+", default=["*.txt"], metavar="PATTERN", help="names of files to take from folders (*.txt)")
    add("--functions", action="store_true", help="each Python function is a document, instead of each file of a folder")
    add("--json-key", default="text", metavar="KEY", help="key of a line's text (text)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", type=whole_number(1, 4096), default=len(os.sched_getaffinity(0)), help="processes (one per core)")
    add("--overwrite", action="store_true", help="replace existing output files")
    add("--tokenizer-type", default=BYTE_LEVEL, choices=[BYTE_LEVEL, *others], help=f"({BYTE_LEVEL})")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`. Returns the exit code, as `balancing.command_line` says."""
    with warnings.catch_warnings():
        # Importing Megatron warns of every missing optional kernel. None is used here.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        return build_parser().run(write, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no partial output remains
    hide_packages()  # Megatron imports them and this program needs none: they take seconds, and one may be broken
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
