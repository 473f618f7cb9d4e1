"""scripts/prepare_data.py: what goes in comes out, whatever the number of workers, and bad input is one clear line."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from tests.support.command import run_python
from tests.support.patience import PATIENCE

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
END_OF_DOCUMENT = 256


@pytest.fixture(scope="module")
def prepare_data():
    specification = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    # Workers unpickle batches by the module's name.
    sys.modules["prepare_data"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["prepare_data"]


@pytest.fixture
def run(prepare_data, capsys):
    """Runs the command line; returns the exit status, standard output and standard error."""

    def run_command_line(*argv):
        try:
            status = prepare_data.main([str(word) for word in argv])
        except SystemExit as exit:  # argparse's way out
            status = exit.code
        out, err = capsys.readouterr()
        return status, out, err

    return run_command_line


def documents(prefix):
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].copy() for i in range(len(dataset))]  # its memory map is gone with the data set


def assert_refused(result, *words, folder=None):
    """One line on stderr that holds `words`, a non-zero status, and nothing written into `folder`."""
    status, _, err = result
    assert status != 0
    assert err.count("\n") == 1 and err.startswith("prepare_data.py: error: "), err
    for word in words:
        assert word in err
    if folder is not None:
        assert list(folder.rglob("*")) == []


def test_files_come_back_byte_for_byte(run, tmp_path):
    texts = {
        "b.txt": "plain\n",
        "a.txt": "",
        "sub/c.txt": "naïve — 数\r\n\0\ttrailing  \n\n",
        "sub/d.md": "not asked for",
    }
    for name, text in texts.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())

    status, out, err = run("--input", tmp_path / "in", "--output-prefix", tmp_path / "out", "--append-eod")

    assert (status, err) == (0, "")
    got = documents(tmp_path / "out")
    assert [document[-1] for document in got] == [END_OF_DOCUMENT] * 2
    assert [bytes(document[:-1].tolist()) for document in got] == [texts["b.txt"].encode(), texts["sub/c.txt"].encode()]
    assert got[0].dtype == np.uint16
    tokens = sum(len(document) for document in got)
    assert f"2 documents, {tokens} tokens" in out and f"longest {len(got[1])}" in out
    assert "Left out as empty: 1 documents" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.bin", "out.idx"]


def test_bytes_that_are_not_utf8_are_counted(run, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    status, out, _ = run("--input", tmp_path, "--output-prefix", tmp_path / "out")
    assert status == 0
    assert bytes(documents(tmp_path / "out")[0].tolist()).decode() == "caf\ufffd"
    assert "Not UTF-8, their undecodable bytes now U+FFFD: 1 files" in out


def test_jsonl_keeps_its_order_and_takes_any_key(run, tmp_path):
    lines = [{"content": f"document {i} " + "x" * (i % 97)} for i in range(1000)]
    file = tmp_path / "in.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    status, _, _ = run("--input", file, "--json-key", "content", "--output-prefix", tmp_path / "out", "--workers", 3)
    assert status == 0
    assert [bytes(ids.tolist()).decode() for ids in documents(tmp_path / "out")] == [line["content"] for line in lines]


def test_output_does_not_depend_on_the_workers(run, prepare_data, monkeypatch, tmp_path):
    monkeypatch.setattr(prepare_data, "BATCH_BYTES", 1 << 12)  # many more batches than may be in flight
    source = Path(sysconfig.get_path("stdlib")) / "email"
    for workers in (1, 2, 5):
        arguments = ("--input", source, "--glob", "*.py", "--output-prefix", tmp_path / f"{workers}")
        assert run(*arguments, "--append-eod", "--workers", workers)[0] == 0
    for end in (".bin", ".idx"):
        assert len({(tmp_path / f"{workers}{end}").read_bytes() for workers in (1, 2, 5)}) == 1
    files = sorted(source.rglob("*.py"))
    contents = [path.read_bytes() for path in files if path.stat().st_size]
    assert [bytes(ids[:-1].tolist()) for ids in documents(tmp_path / "5")] == contents


@pytest.mark.parametrize(
    "functions", [[], pytest.param(["--functions"], marks=pytest.mark.exhaustive)], ids=["files", "functions"]
)
def test_standard_library_from_the_command_line(tmp_path, functions):
    """The whole command, as the quickstart calls it for functions: real text of heavy-tailed length."""
    prefix = tmp_path / "deep" / "stdlib"
    done = run_python(SCRIPT, "--stdlib", *functions, "--append-eod", "--output-prefix", prefix)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lengths = [len(ids) for ids in documents(prefix)]
    assert len(lengths) > (10_000 if functions else 300)
    assert np.max(lengths) > 20 * np.median(lengths)
    assert np.mean(lengths) > 1.5 * np.median(lengths)
    assert "--vocab-size 258 --null-tokenizer-eod-id 256 --null-tokenizer-pad-id 257" in done.stdout
    if functions:
        assert np.median(lengths) < 512, "a sample of the quickstart, 1024 tokens, would not hold several documents"


def test_each_function_is_a_document(run, tmp_path):
    """Decorators and what is inside of a function belong to it; other text is left out. Form feeds are no new lines."""
    first = "@cached\n@other\ndef first(x):\n    def inner():\n        pass\n    return inner\n"
    method = "async def method(self):\n    return 1\n"
    indented = "".join(f"    {line}\n" for line in method.splitlines())
    (tmp_path / "a.py").write_text(f"import os\n\x0c\n{first}\nclass Kind:\n    name = 'kind'\n{indented}")
    (tmp_path / "b.py").write_text("x = 1\n")
    arguments = ("--input", tmp_path, "--glob", "*.py", "--functions", "--workers", 1)
    assert run(*arguments, "--output-prefix", tmp_path / "out")[0] == 0
    assert [bytes(ids.tolist()).decode() for ids in documents(tmp_path / "out")] == [first, method]


@pytest.mark.parametrize("workers", [1, 2])
def test_functions_of_what_is_no_python(run, tmp_path, workers):
    (tmp_path / "bad.py").write_text("def (:\n")
    (tmp_path / "out").mkdir()
    arguments = ("--input", tmp_path, "--glob", "*.py", "--functions", "--workers", workers)
    result = run(*arguments, "--output-prefix", tmp_path / "out" / "x")
    assert_refused(result, "bad.py is not Python source", "--functions", folder=tmp_path / "out")


def test_training_flags_it_prints_name_the_same_special_tokens(prepare_data):
    """The NullTokenizer that the summary recommends agrees with the byte-level tokenizer that wrote the data."""
    from megatron.core.tokenizers import MegatronTokenizer

    args = prepare_data.build_parser().parse_args(["--stdlib", "--output-prefix", "unused"])
    ours = prepare_data.build_tokenizer(args)
    null = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"},
        vocab_size=prepare_data.BYTE_LEVEL_VOCABULARY,
        eod_id=prepare_data.END_OF_DOCUMENT,
        pad_id=prepare_data.PADDING,
    )
    assert (ours.vocab_size, ours.eod, ours.pad) == (null.vocab_size, null.eod, null.pad)
    assert ours.tokenize("".join(map(chr, range(128)))) == list(range(128))


def test_another_tokenizer_of_megatron(run, tmp_path):
    (tmp_path / "ids.txt").write_text("5 70000 9")
    output = tmp_path / "out"
    arguments = ["--input", tmp_path, "--output-prefix", output, "--tokenizer-type", "NullTokenizer", "--append-eod"]
    status, out, _ = run(*arguments, "--vocab-size", 80000)
    assert status == 0
    assert documents(output)[0].tolist() == [5, 70000, 9, 79999]
    assert documents(output)[0].dtype == np.int32
    assert "Train on it with" not in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "cut', ["line 3 is not JSON", "must be JSONL"]),
        ('{"body": "x"}', ["line 3 has no key 'text', only ['body']", "--json-key"]),
        ('["x"]', ["line 3 is not a JSON object but a list"]),
        ('{"text": 7}', ["line 3: 'text' is not text but a int"]),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named(run, tmp_path, line, words, workers):
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
    (tmp_path / "out").mkdir()
    result = run("--input", file, "--output-prefix", tmp_path / "out" / "x", "--workers", workers)
    assert_refused(result, str(file), *words, folder=tmp_path / "out")


@pytest.mark.parametrize("prefix", ["od/", "od/.", ""])
def test_a_prefix_that_is_a_folder_is_refused(run, tmp_path, monkeypatch, prefix):
    """It would make hidden files, od/.bin and od/.idx."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "od").mkdir()
    (tmp_path / "a.txt").write_text("text")
    result = run("--input", tmp_path, "--output-prefix", prefix)
    assert_refused(result, f"--output-prefix {prefix} names a folder", "corpus", folder=tmp_path / "od")


def test_corpora_without_text_are_refused(run, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    arguments = ("--input", tmp_path / "in", "--output-prefix", tmp_path / "out" / "x")
    assert_refused(run(*arguments), str(tmp_path / "in"), "*.txt", "--glob", folder=tmp_path / "out")
    (tmp_path / "in" / "a.txt").touch()
    assert_refused(run(*arguments), "the corpus is empty", folder=tmp_path / "out")
    missing = ("--input", tmp_path / "none", "--output-prefix", tmp_path / "out" / "x")
    assert_refused(run(*missing), str(tmp_path / "none"), "No such file or directory", folder=tmp_path / "out")


def test_a_folder_that_cannot_be_read_is_refused(run, monkeypatch, tmp_path):
    (tmp_path / "in" / "locked").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("readable")
    scandir = os.scandir

    def refuse(path):  # permissions do not stop root, whom tests may run as
        if Path(path).name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = run("--input", tmp_path / "in", "--output-prefix", tmp_path / "out")
    assert_refused(result, str(tmp_path / "in" / "locked"), "Permission denied")


def test_an_output_that_cannot_be_written_is_refused(run, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    blocked = tmp_path / "a.txt" / "x"
    assert_refused(run("--input", tmp_path, "--output-prefix", blocked), str(tmp_path / "a.txt"))


def test_an_output_that_is_there_is_kept(run, tmp_path):
    (tmp_path / "a.txt").write_text("first")
    arguments = ("--input", tmp_path, "--output-prefix", tmp_path / "out")
    assert run(*arguments)[0] == 0
    before = (tmp_path / "out.bin").read_bytes()
    (tmp_path / "a.txt").write_text("second")
    assert_refused(run(*arguments), str(tmp_path / "out.bin"), "--overwrite")
    assert (tmp_path / "out.bin").read_bytes() == before
    assert run(*arguments, "--overwrite")[0] == 0
    assert bytes(documents(tmp_path / "out")[0].tolist()) == b"second"


def test_a_full_disk_leaves_nothing_half_written(run, monkeypatch, tmp_path):
    """The output of an earlier run stays, too."""
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    arguments = ("--input", tmp_path, "--output-prefix", tmp_path / "out", "--overwrite")
    assert run(*arguments)[0] == 0
    before = {end: (tmp_path / f"out{end}").read_bytes() for end in (".bin", ".idx")}
    add_document = IndexedDatasetBuilder.add_document

    def fill_up(builder, *arguments, **named):
        if builder.sequence_lengths:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add_document(builder, *arguments, **named)

    monkeypatch.setattr(IndexedDatasetBuilder, "add_document", fill_up)
    assert_refused(run(*arguments), str(tmp_path / "out"), "No space left on device")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.txt", "out.bin", "out.idx"}
    assert {end: (tmp_path / f"out{end}").read_bytes() for end in before} == before


def test_a_killed_worker_is_reported(run, prepare_data, monkeypatch, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    monkeypatch.setattr(prepare_data.Tokenize, "__call__", lambda self, batch: os.kill(os.getpid(), signal.SIGKILL))
    result = run("--input", tmp_path / "in", "--output-prefix", tmp_path / "out" / "x", "--workers", 2)
    assert_refused(result, "a worker was killed", "--workers")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_terminated_run_leaves_no_files_and_no_workers(tmp_path):
    os.mkfifo(tmp_path / "endless.jsonl")
    command = [sys.executable, SCRIPT, "--input", tmp_path / "endless.jsonl", "--workers", "2"]
    with subprocess.Popen([*command, "--output-prefix", tmp_path / "out" / "x"], stderr=subprocess.PIPE) as process:
        try:
            with (tmp_path / "endless.jsonl").open("wb") as lines:  # opens once the script reads
                for _ in range(2):
                    lines.write(json.dumps({"text": "x" * (1 << 20)}).encode() + b"\n")
                lines.flush()
                while len(workers := psutil.Process(process.pid).children()) < 2:
                    assert process.poll() is None
                    time.sleep(0.02)
                assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".part", ".part"]
                process.terminate()
                assert process.wait(PATIENCE) == 143
        finally:
            process.kill()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, PATIENCE)[1] == []
    assert list((tmp_path / "out").iterdir()) == []


def test_a_run_that_is_terminated_while_its_workers_start_ends(tmp_path):
    """The pool has forked them and does not watch them yet."""
    (tmp_path / "a.txt").write_text("text")
    code = f"""if True:
        import os, runpy, signal, sys
        from concurrent.futures import ProcessPoolExecutor

        launch = ProcessPoolExecutor._launch_processes

        def launch_and_be_terminated(pool):
            launch(pool)
            os.kill(os.getpid(), signal.SIGTERM)

        ProcessPoolExecutor._launch_processes = launch_and_be_terminated
        sys.argv[1:] = ["--input", {str(tmp_path)!r}, "--workers", "2", "--output-prefix", {str(tmp_path / "out/x")!r}]
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    """
    done = run_python("-c", code)  # waits for the workers, too, which have its output
    assert done.returncode == 143, done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stdlib"], ["--output-prefix"]),
        (["--output-prefix", "x"], ["--input", "--stdlib"]),
        (["--stdlib", "--input", "x", "--output-prefix", "x"], ["--stdlib", "not allowed with"]),
        (["--stdlib", "--output-prefix", "x", "--workers", "0"], ["--workers: 0 must be a whole number from 1"]),
        (["--stdlib", "--output-prefix", "x", "--tokenizer-type", "Nonsense"], ["'Nonsense'", "ByteLevelTokenizer"]),
        (["--stdlib", "--output-prefix", "x", "--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_wrong_flags_are_one_line(run, arguments, words):
    assert_refused(run(*arguments), *words)


def test_a_tokenizer_that_cannot_be_built_is_one_line(run, tmp_path):
    arguments = ["--stdlib", "--output-prefix", tmp_path / "x", "--tokenizer-type", "GPTSentencePieceTokenizer"]
    assert_refused(run(*arguments, "--tokenizer-model", tmp_path / "none.model"), "GPTSentencePieceTokenizer")
