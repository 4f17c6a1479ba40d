"""What ``zprof export`` makes of damaged, empty and hostile traces, and of outputs that cannot be; how it says no."""

from __future__ import annotations

import csv
import io
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import python
from tests.support.zprof_exports import Export, exporting, promtool, refused, well
from tests.support.zprof_formats import check_exposition, check_speedscope, check_trace_events
from tests.support.zprof_traces import HEADER, KIB, MIB, sample_rows, write_trace
from zprof.commands.export import FORMATS
from zprof.rows import Row, RowKind, placed
from zprof.trace.reader import DROPPED

START = HEADER.mono_ns
BEGIN, END, INSTANT, COUNTER, ALLOC, FREE, SPAN = RowKind
#: Names as scripts, file systems and people who try us make them.
ODD = [
    '=1+1', 'a"b', "new\nline", "nul\0x", "\x1b[31mred", "\u202ebidi", "lone\ud800s", "é漢😀", "</script>", "back\\slash",
    "\r\n", ",comma", "\x85\u2028", "x" * MIB, "a." * 3000, "", "{}", "%s %d", "🜁" * 999,
]  # fmt: skip


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    return exporting(tmp_path, monkeypatch)


def odd_rows() -> Iterator[Row]:
    at = START
    for number, name in enumerate(ODD):
        for what in ("compute", "gather", "wait gather", name):
            yield Row(BEGIN, what, name, 5, at := at + 1001)
            yield Row(END, what, name, 7, at := at + 999)
        yield Row(COUNTER, placed("parameter", "device"), name, 100, at := at + 3)
        yield Row(COUNTER, name or "empty", name, 100, at := at + 3)
        yield Row(ALLOC, placed("activation", "device"), name, 4 * KIB, at := at + 3, 0, number + 1)
        yield Row(INSTANT, "oom", name, 1 << 40, at := at + 3)


def check(kind: str, path: Path) -> None:
    if kind == "perfetto":
        check_trace_events(path.read_bytes())
    elif kind == "speedscope":
        check_speedscope(path.read_bytes())
    elif kind == "prometheus":
        check_exposition(path.read_bytes())
        promtool(path.read_bytes())
    elif kind == "csv":
        assert {len(row) for row in csv.reader(io.StringIO(path.read_bytes().decode(), newline=""))} == {8}
    elif kind == "torch-snapshot":
        assert set(pickle.loads(path.read_bytes())) >= {"segments", "device_traces"}
    else:
        accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        accumulators.EventAccumulator(str(path / "rank0")).Reload()


@pytest.mark.parametrize("kind", FORMATS)
def test_names_of_any_kind_go_through_every_format(export: Export, kind: str) -> None:
    path = write_trace(Path('odd "\udcff\n.zprof'), odd_rows(), host='h"\\\n\0ost', argv=("=x", "a\nb"))
    told = export(path, "--format", kind, "-o", 'out"\n\x1b[0m')
    assert (told.exit_code, told.stdout.count("\n"), "\x1b" in told.stdout) == (0, 1, False), told.output
    check(kind, Path('out"\n\x1b[0m'))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_trace_that_holds_nothing_is_an_empty_file_or_one_line(export: Export, kind: str) -> None:
    path = write_trace(Path("run.zprof"), [])
    result = export(path, "--format", kind, "-o", "out")
    if kind in ("speedscope", "torch-snapshot"):
        assert refused(result).startswith("run.zprof: expected ") and not Path("out").exists()
    else:
        well(result)
        check(kind, Path("out"))


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_told_and_the_rest_is_exported(export: Export, kind: str) -> None:
    body = write_trace(Path("whole.zprof"), sample_rows(level="alloc", steps=40), level="alloc").read_bytes()
    Path("cut.zprof").write_bytes(body[: len(body) * 2 // 3])
    mutated = bytearray(body)
    mutated[len(body) // 2] ^= 0xFF
    Path("flip.zprof").write_bytes(mutated)
    for name, words in (("cut", "ends inside a chunk"), ("flip", "its check is wrong")):
        result = export(f"{name}.zprof", "--format", kind, "-o", name)
        assert result.exit_code == 0 and result.stderr.count("\n") == 1
        assert result.stderr.startswith(f"{name}.zprof: ") and words in result.stderr
        check(kind, Path(name))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "torch-snapshot"])
def test_levels_below_zero_and_times_before_the_start_are_no_trouble(export: Export, kind: str) -> None:
    rows = [
        Row(BEGIN, "compute", "early", 0, START - 900_000),
        Row(FREE, placed("activation", "device"), "m", MIB, START + 5, 0, 77),
        Row(COUNTER, "rss", "", 5, 5),
        Row(END, "compute", "early", 0, START + 10),
        Row(END, "compute", "never begun", 0, START + 10),
    ]
    well(export(write_trace(Path("run.zprof"), rows), "--format", kind, "-o", "out"))
    check(kind, Path("out"))


def test_rows_that_the_recording_lost_are_told(export: Export) -> None:
    path = write_trace(Path("run.zprof"), sample_rows(), notes={DROPPED: {"rows": 1234}})
    result = export(path, "--format", "csv")
    assert result.exit_code == 0 and result.stderr.startswith("run.zprof: 1,234 rows were thinned out or lost")


# --- where it is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_an_output_that_cannot_be_is_one_line_and_leaves_nothing_behind(export: Export, kind: str) -> None:
    path = write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    Path("there").write_text("kept")
    Path("folder").mkdir()
    assert "there: exists already" in refused(export(path, "--format", kind, "-o", "there"))
    assert "expected a folder missing, found none" in refused(export(path, "--format", kind, "-o", "missing/out"))
    assert "cannot be written" in refused(export(path, "--format", kind, "-o", "/proc/zprof-export"))
    if kind != "tensorboard":
        for force in ([], ["--force"]):
            assert "folder: expected a file, found a folder" in refused(export(path, "--format", kind, "-o", "folder", *force))
            assert "found a device or a pipe" in refused(export(path, "--format", kind, "-o", "/dev/null", *force))
    assert Path("there").read_text() == "kept"
    assert {one.name for one in Path().iterdir()} == {"run.zprof", "there", "folder"}


@pytest.mark.parametrize("name", ["run.zprof", "./run.zprof", "link"])
def test_the_run_itself_is_never_written_over(export: Export, name: str) -> None:
    path = write_trace(Path("run.zprof"), sample_rows())
    Path("link").symlink_to("run.zprof")
    body = path.read_bytes()
    assert "is the run itself" in refused(export(path, "--format", "csv", "-o", name, "--force"), code=2)
    assert path.read_bytes() == body


def test_help_shows_examples_and_every_format(export: Export) -> None:
    told = export("--help").stdout
    assert "zprof export runs/ --format speedscope" in told and all(kind in told for kind in FORMATS)
    assert max(map(len, told.splitlines())) <= 80


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(export: Export) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc", steps=20), level="alloc")
    bounded = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\nfrom zprof.cli import main\n"
    for kind in ("perfetto", "csv", "torch-snapshot", "tensorboard"):
        code = f"{bounded}main(['export', 'run.zprof', '--format', '{kind}', '-o', 'out'], prog_name='zprof')"
        told = python("-c", code)
        assert (told.returncode, told.stdout) == (1, "")
        assert told.stderr == "out: cannot be written: File too large; name another with -o\n"
        assert [one.name for one in Path().iterdir()] == ["run.zprof"]


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [
        ("prometheus", "prometheus_client", "prometheus_client: needed for Prometheus' format"),
        ("tensorboard", "tensorboard.compat.proto.event_pb2", "tensorboard: needed for its format"),
    ],
)
def test_without_its_library_a_format_names_the_remedy(
    export: Export, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, package: str
) -> None:
    write_trace(Path("run.zprof"), sample_rows())
    monkeypatch.setitem(sys.modules, module, None)
    remedy = f"pip install 'zhooks[{kind}]'"
    assert refused(export("run.zprof", "--format", kind), code=4) == f"{package}, not installed; {remedy}\n"
    assert [one.name for one in Path().iterdir()] == ["run.zprof"]


def test_mutated_traces_give_a_right_file_or_one_line(export: Export) -> None:
    body = write_trace(Path("whole.zprof"), sample_rows(level="alloc"), level="alloc").read_bytes()
    choose = random.Random(4)
    good = 0
    for number in range(120):
        mutated = bytearray(body)
        for _ in range(choose.randint(1, 4)):
            mutated[choose.randrange(len(body))] = choose.randrange(256)
        Path("run.zprof").write_bytes(mutated[: choose.choice([len(body), choose.randrange(len(body))])])
        kind = ("perfetto", "speedscope", "csv", "prometheus")[number % 4]
        result = export("run.zprof", "--format", kind, "-o", "out", "--force")
        if result.exit_code:
            refused(result)
        else:
            check(kind, Path("out"))
            good += 1
    assert good > 40


def test_rows_of_any_values_give_a_right_file_or_one_line(export: Export) -> None:
    choose = random.Random(5)
    whats = ["compute", "forward", "step", "update", "gather", "wait gather", "oom", "rss", "nvml power", ""]
    whats += [placed("parameter", "device"), placed("activation", "host")]
    for number in range(120):
        start = choose.choice([0, START, START + 10**15])
        rows = [
            Row(
                choose.randrange(len(RowKind)),
                choose.choice(whats),
                choose.choice(["a", "a.b", "", choose.choice(ODD)]),
                choose.choice([0, 1, 5000, 1 << 46, choose.choice([3, 3, 3, -5, 1 << 55])]),
                start + choose.randrange(5000),
                choose.choice([0, 1, (1 << 31) - 1]),
                choose.randrange(4),
            )
            for _ in range(choose.randint(1, 200))
        ]
        path = Path(f"{number}.zprof")
        write_trace(path, rows, rank=choose.choice([0, 5]), world=6)
        kind = ("perfetto", "speedscope", "prometheus", "tensorboard")[number % 4]
        result = export(path, "--format", kind, "-o", f"{number}.out")
        if result.exit_code:
            refused(result)
            assert not Path(f"{number}.out").exists()
        elif kind != "tensorboard":
            check(kind, Path(f"{number}.out"))
