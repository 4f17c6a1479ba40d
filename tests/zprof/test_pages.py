"""The pages of ``zprof timeline`` and ``zprof flamegraph``: what is in them, and what they do when people click."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.browser import Browser, opened, why_none
from tests.support.many_ranks import LARGE, SLOW, job
from tests.support.zprof_command import Zprof
from tests.support.zprof_pages import column, data_of, unpacked
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof.analysis.curves import module_of
from zprof.rows import Row, RowKind
from zprof.show.pages import timeline as page_timeline
from zprof.show.pages.lanes import Kept, Lane, Spans, keep
from zprof.show.pages.page import page as page_of
from zprof.show.pages.page import page_path
from zprof.show.pages.tree import Node, group_small, tree

pytest.importorskip("plotly", reason="needs plotly: pip install 'zhooks[pages]'")

HOSTILE = {
    "model.layers.0": "<script>alert(1)</script>",
    "model.layers.1": "</script><img src=x onerror=alert(1)>",
    "model.layers.2": "a&amp;b\u2028<b>bold</b>",
    "model.layers.3": "</title>'\"$x$ %{label} \x1b[31m",
    "model.layers.4": "<img src=y onerror=alert(2)>",
}


def renamed(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows with the units of hostile names."""
    for row in rows:
        found = next((unit for unit in HOSTILE if unit in row.key), None)
        yield row if found is None else row._replace(key=row.key.replace(found, HOSTILE[found]))


class Tags(HTMLParser):
    """The names of elements, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def tags(text: str) -> list[str]:
    parser = Tags()
    parser.feed(text)
    return parser.found


# --- what goes into a page --------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), st.text())
def test_no_name_breaks_out_of_a_page_and_all_of_it_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: object, title: str
) -> None:
    text = page_of(title, {"data": data}, scripts=())
    assert tags(text) == tags(page_of("title", {}, scripts=())) and tags(text).count("script") == 4
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(text, encoding="utf-8")
    assert json.loads(unpacked(path, "data")) == {"data": data}


def test_a_page_asks_no_network_and_runs_only_its_own_scripts(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), renamed(sample_rows(steps=2, units=4)))
    for command in ("timeline", "flamegraph"):
        assert zprof(command, "run.zprof").exit_code == 0
        text = Path(f"run.{command}.html").read_text(encoding="utf-8")
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
        assert policy and "default-src 'none'; script-src 'sha256-" in policy[1]
        scripts = re.findall(r"<script\b[^>]*>", text)
        packed = [f'<script type="application/gzip" id="{element}">' for element in ("data", "plotly", "drawing")]
        assert scripts == [*packed, "<script>"]
        head = text[: text.index("<script")]
        assert "http://" not in head and "https://" not in head and " src=" not in head
        assert not any(name in text for name in HOSTILE.values()) and "onerror" not in text


def test_a_page_is_named_after_its_run_and_never_written_over_unasked(zprof: Zprof, tmp_path: Path) -> None:
    write_trace(Path("run.0.zprof"), sample_rows(steps=1, units=2))
    result = zprof("timeline", "run.0.zprof")
    assert result.exit_code == 0 and result.stdout.startswith("run.0.timeline.html: ")
    assert "zprof report run.0.zprof" in result.stdout
    again = zprof("timeline", "run.0.zprof")
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == "run.0.timeline.html: exists already; overwrite it with -f, or name another with -o\n"
    assert zprof("timeline", "run.0.zprof", "--force").exit_code == 0
    recorded = Path("run.0.zprof").read_bytes()
    assert zprof("flamegraph", "run.0.zprof", "-f", "-o", "./run.0.zprof").exit_code == 1
    assert Path("run.0.zprof").read_bytes() == recorded
    missing = zprof("flamegraph", "run.0.zprof", "-o", "none/page.html")
    assert (missing.exit_code, missing.stderr) == (1, "none/page.html: cannot be written: No such file or directory\n")
    assert {path.name for path in tmp_path.iterdir()} == {"run.0.zprof", "run.0.timeline.html"}


def test_pages_of_several_ranks_are_named_after_what_the_ranks_share() -> None:
    assert page_path([Path("a/run.zprof")], "timeline") == Path("a/run.timeline.html")
    assert page_path([Path("run.0.zprof"), Path("run.1.zprof")], "timeline") == Path("run.timeline.html")
    assert page_path([Path("run.10.zprof"), Path("run.11.zprof")], "timeline") == Path("run.timeline.html")
    assert page_path([Path("0.zprof"), Path("1.zprof")], "timeline") == Path("0.timeline.html")


def test_a_page_is_its_users_alone_whatever_the_umask(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=1, units=2))
    old = os.umask(0)
    try:
        assert zprof("flamegraph", "run.zprof").exit_code == 0
    finally:
        os.umask(old)
    assert Path("run.flamegraph.html").stat().st_mode & 0o777 == 0o600


def test_without_plotly_the_remedy_is_named_and_the_exit_code_is_4(zprof: Zprof, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=1, units=2))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for command in ("timeline", "flamegraph"):
        result = zprof(command, "run.zprof")
        assert (result.exit_code, result.stderr) == (
            4,
            "plotly: needed for pages, not installed; pip install 'zhooks[pages]'\n",
        )


def test_the_peak_in_both_pages_is_the_ledgers_to_the_byte(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=3, units=4, level="alloc"), device="cuda:0")
    assert zprof("timeline", "run.zprof").exit_code == 0
    assert zprof("flamegraph", "run.zprof").exit_code == 0
    report = json.loads(zprof("report", "run.zprof", "--json").stdout)["runs"][0]["tiers"]
    [run] = data_of(Path("run.timeline.html"))["runs"]
    peaks = {view["name"]: view["peak"] for view in run["views"]}
    assert {tier: peak["total"] for tier, peak in peaks.items()} == {tier: report[tier]["bytes"] for tier in peaks}
    for peak in peaks.values():
        assert sum(holder[0] for holder in peak["holders"]) + peak["others"][1] == peak["total"]
    flame = {tier["tier"]: tier["total"] for tier in data_of(Path("run.flamegraph.html"))["tiers"]}
    assert flame == {tier: peak["total"] for tier, peak in peaks.items()}


def test_a_step_that_was_not_recorded_is_one_line(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=2, units=2))
    assert zprof("flamegraph", "run.zprof", "--at", "step:1").exit_code == 0
    result = zprof("flamegraph", "run.zprof", "-f", "--at", "step:7")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "steps 0 to 1" in result.stderr and "--at step:1 is the last" in result.stderr
    assert zprof("flamegraph", "run.zprof", "--at", "noon").exit_code == 2


def test_a_trace_of_nothing_makes_pages_that_say_so(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), [])
    for command in ("timeline", "flamegraph"):
        result = zprof(command, "run.zprof")
        assert result.exit_code == 0 and "no memory recorded" in result.stdout


def test_ten_thousand_names_do_not_make_most_of_a_page(zprof: Zprof) -> None:
    rows = [
        Row(kind, "compute", f"{'<' * 190}{number}", 0, 2_000_000_000 + 10 * number + end)
        for number in range(10_000)
        for end, kind in enumerate((RowKind.BEGIN, RowKind.END))
    ]
    write_trace(Path("run.zprof"), rows)
    assert zprof("timeline", "run.zprof").exit_code == 0
    assert len(json.dumps(data_of(Path("run.timeline.html")))) < 2 << 20


def test_plotly_is_packed_into_a_page_and_its_hash_is_of_what_is_unpacked(zprof: Zprof) -> None:
    from zprof.show.pages.page import plotly_source

    write_trace(Path("run.zprof"), sample_rows(steps=1, units=2))
    assert zprof("timeline", "run.zprof").exit_code == 0
    text = Path("run.timeline.html").read_text(encoding="utf-8")
    source = unpacked(Path("run.timeline.html"), "plotly")
    assert source.decode() == plotly_source()
    for each in (source, unpacked(Path("run.timeline.html"), "drawing")):
        assert base64.b64encode(hashlib.sha256(each).digest()).decode() in text
    assert len(text) < len(source) / 2


LATE_NS = 31_000_000_000


def test_a_timeline_begins_at_the_first_step_and_says_what_was_before(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=3, units=4, start_ns=LATE_NS))
    assert zprof("timeline", "run.zprof").exit_code == 0
    data = data_of(Path("run.timeline.html"))
    focus, tick_ns = data["focus"], data["tick_ns"]
    assert focus["what"] == "first step" and 30.0 <= focus["before_ns"] / 1e9 < 30.1
    assert 0.9 * focus["before_ns"] < focus["begin"] * tick_ns < focus["before_ns"]
    write_trace(Path("soon.zprof"), sample_rows(steps=3, units=4))
    assert zprof("timeline", "soon.zprof").exit_code == 0
    assert data_of(Path("soon.timeline.html"))["focus"] is None


def test_a_peak_before_the_first_step_is_in_what_a_timeline_shows_first(zprof: Zprof) -> None:
    early = [
        Row(kind, "other on device", "loaded", 4 << 30, at_ns)
        for kind, at_ns in ((RowKind.ALLOC, 11_000_000_000), (RowKind.FREE, 12_000_000_000))
    ]
    write_trace(Path("run.zprof"), [*early, *sample_rows(steps=3, units=4, start_ns=LATE_NS)])
    assert zprof("timeline", "run.zprof").exit_code == 0
    data = data_of(Path("run.timeline.html"))
    assert data["focus"]["begin"] * data["tick_ns"] < 10_000_000_000 <= data["focus"]["before_ns"]


def test_a_page_says_first_what_the_report_says_first(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    told = json.loads(zprof("timeline", "run.zprof", "--json").stdout)
    report = json.loads(zprof("report", "run.zprof", "--json").stdout)
    shown = data_of(Path("run.timeline.html"))["report"]
    assert shown["summary"] == told["summary"] == report["summary"] and len(report["summary"]) >= 4
    assert shown["not_recorded"] == report["runs"][0]["not_recorded"] and shown["remedies"] == report["runs"][0]["remedies"]
    assert shown["step_ms"] == report["runs"][0]["measures"]["step.median_ms"]


def test_the_table_of_units_has_the_figures_of_the_report(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(units=6, level="alloc"), level="alloc")
    assert zprof("timeline", "run.zprof").exit_code == 0
    units = data_of(Path("run.timeline.html"))["units"]
    run = json.loads(zprof("report", "run.zprof", "--json", "--by", "module").stdout)["runs"][0]
    for tier, of_tier in zip(units["tiers"], units["held"], strict=True):
        held = {name: nbytes for name, nbytes in zip(units["name"], of_tier, strict=True) if nbytes}
        assert held == run["tiers"][tier]["groups"]
    waited: Counter[tuple[str, str]] = Counter()
    for wait in run["waits"]:
        waited[module_of(wait["unit"]), wait["what"]] += wait["ms_per_step"]
    shown = {
        (name, kind): ms
        for kind, column in zip(units["kinds"], units["ms"], strict=True)
        for name, ms in zip(units["name"], column, strict=True)
        if ms
    }
    assert shown == pytest.approx(waited, abs=1e-6)
    assert run["waits"] and units["unseen"] is None


# --- what is merged ---------------------------------------------------------------------------------------------------

LANE = Lane("lane", ("a", "b"), rows=2)


@st.composite
def lanes(draw: st.DrawFn) -> Spans:
    spans = draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 10_000), st.integers(0, 400)), max_size=80)
    )
    what, key, begin, length = np.array(spans, dtype=np.int64).reshape(-1, 4).T
    return Spans(LANE, what, key, begin, begin + length, length * 3)


def total(parts: list[Kept], name: str) -> int:
    return sum(int(getattr(part, name).sum()) for part in parts)


def told(spans: Spans | Kept, which: NDArray[np.bool_]) -> set[tuple[int, ...]]:
    columns = (spans.begin_ns, spans.end_ns, spans.key, spans.what, spans.nbytes)
    return set(zip(*(column[which].tolist() for column in columns), strict=True))


@settings(max_examples=60)
@given(st.lists(lanes(), min_size=1, max_size=3), st.integers(8, 60))
def test_merging_keeps_the_budget_and_loses_no_span_no_byte_and_no_time(parts: list[Spans], most: int) -> None:
    kept, merge_ns, _ = keep(parts, 10_400, [(2000, 2400)], most=most)
    assert sum(len(part.count) for part in kept) <= max(most, 4 * len(parts) * 2)
    assert total(kept, "count") == sum(map(len, parts))
    assert total(kept, "nbytes") == sum(int(part.nbytes.sum()) for part in parts)
    assert total(kept, "busy_ns") == sum(int((part.end_ns - part.begin_ns).sum()) for part in parts)
    for before, after in zip(parts, kept, strict=True):
        long = before.end_ns - before.begin_ns >= max(merge_ns, 1)
        assert told(before, long) <= told(after, after.count == 1)


def test_spans_of_a_kept_window_are_not_merged() -> None:
    begin = np.arange(0, 100_000, 10, dtype=np.int64)
    spans = Spans(LANE, begin * 0, begin // 10, begin, begin + 4, begin * 0)
    [kept], merge_ns, whole = keep([spans], 100_000, [(50_000, 51_000), (70_000, 71_000)], most=500)
    assert merge_ns > 4 and whole == 2 and len(kept.count) <= 500
    inside = (kept.begin_ns >= 50_000) & (kept.begin_ns < 51_000)
    assert inside.sum() == 100 and (kept.count[inside] == 1).all()


def test_spans_that_overlap_lie_in_rows_below_one_another() -> None:
    columns = np.array([(0, 100), (0, 40), (50, 90), (60, 80)], dtype=np.int64)
    zeros = np.zeros(4, dtype=np.int64)
    lane = dataclasses.replace(LANE, rows=3)
    [kept], _, _ = keep([Spans(lane, zeros, zeros, columns[:, 0], columns[:, 1], zeros)], 100)
    assert kept.row == [0, 1, 1, 2]


@given(st.lists(st.tuples(st.text("ab.<", max_size=6), st.sampled_from(["parameter", "gradient"]), st.integers(-5, 1000))))
def test_every_module_holds_what_the_parts_below_it_hold(held: list[tuple[str, str, int]]) -> None:
    top = tree(iter(held), "device")
    assert top.nbytes == sum(nbytes for _, _, nbytes in held if nbytes > 0)

    def check(node: Node) -> None:
        if not node.category:
            assert node.nbytes == sum(child.nbytes for child in node.children.values())
        for child in node.children.values():
            check(child)

    check(top)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 3))
def test_many_small_siblings_are_put_into_groups_that_hold_what_they_hold(count: int, most: int, large: int) -> None:
    sizes = {str(number): 10 + number % most for number in range(count)} | {f"wide{number}": 10_000 for number in range(large)}
    top = tree(((f"blocks.{name}", "parameter", nbytes) for name, nbytes in sizes.items()), "device")
    # Too small to be read beside 64 others.
    small = [name for name, nbytes in sizes.items() if nbytes * 64 < sum(sizes.values())]
    group_small(top)
    [blocks] = top.children.values()
    groups = [node for node in blocks.children.values() if node.group]
    inside = {child.name: child.nbytes for group in groups for child in group.children.values()}
    beside = {node.name: node.nbytes for node in blocks.children.values() if not node.group}
    assert inside | beside == sizes and not inside.keys() & beside.keys()
    assert list(inside) == (small if len(small) > 64 else []) and len(groups) <= 21
    assert all(group.nbytes == sum(child.nbytes for child in group.children.values()) for group in groups)
    assert all(group.group == len(group.children) for group in groups)


# --- in a browser -----------------------------------------------------------------------------------------------------

WHY_NONE = why_none()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


#: Where the first span of a lane was drawn, in pixels of its chart.
PLACE = """
const row = DATA.runs[0].drawn.find((row) => row.lane.name === arguments[0]), span = row.spans[0];
const ms = ((span.begin + span.end) / 2) * TICK_MS;
return [LEFT + ((ms - state.begin) / (state.end - state.begin)) * plotWidth(), 8 + (row.top + span.row + 0.7) * ROW];
"""


#: Whether all that is drawn of the first step kept whole are spans of the run, none of them merged.
ALONE = """
const [step] = DATA.whole;
return DATA.runs[0].lanes.every((lane) => lane.begin.every((begin, i) =>
  begin < step.begin || begin >= step.end || !lane.count || lane.count[i] === 1));
"""


def test_a_timeline_is_drawn_and_answers_clicks_without_a_complaint_or_a_request(zprof: Zprof, browser: Browser) -> None:
    write_trace(Path("run.zprof"), renamed(sample_rows(steps=3, units=6, level="alloc")), level="alloc")
    assert zprof("timeline", "run.zprof").exit_code == 0
    browser.open(Path("run.timeline.html"))
    assert browser.run("return document.querySelectorAll('#lanes-plot-0 .scatterlayer .trace').length") > 6
    assert not browser.run("return document.querySelectorAll('img, #page script').length")

    before = browser.run("return document.documentElement.dataset.theme")
    browser.click("#theme")
    after = browser.run("return document.documentElement.dataset.theme")
    assert {before, after} == {"dark", "light"}

    browser.click("#peak")
    assert browser.text("#panel-title").startswith("Peak: ")
    assert HOSTILE["model.layers.0"] in browser.text("#panel-body")
    browser.click("#whole")

    browser.press("#search", "<script>")
    # The unit, and the block on disk or the path that is named after it.
    assert browser.text("#found").endswith(("name found", "names found")) and not browser.text("#found").startswith("0 ")
    browser.run("document.getElementById('search').value = ''")
    browser.press("#search", "<img src=y")
    assert HOSTILE["model.layers.4"] in browser.text("#units-body") and "model.layers.5" not in browser.text("#units-body")
    browser.run("document.getElementById('search').value = ''; search('')")

    x, y = browser.run(PLACE, "gathers")
    browser.hover_at("#lanes-plot-0", x, y)
    assert HOSTILE["model.layers.0"] in browser.text("#tip")
    browser.click_at("#lanes-plot-0", x, y)
    assert browser.text("#panel-title") == "gather"
    told = browser.text("#panel-body")
    assert HOSTILE["model.layers.0"] in told and f"({12 * MIB:,})" in told and "exposed" in told and "/s" in told
    browser.click("#panel-close")
    assert browser.run("return document.getElementById('panel').hidden")

    width = browser.run("return state.end - state.begin")
    browser.press("#lanes-plot-0", "+")
    assert browser.run("return state.end - state.begin") == pytest.approx(width / 2)
    assert browser.complaints() == [] and browser.requests() == []


@pytest.mark.slow
def test_what_was_before_the_first_step_is_seen_when_zoomed_out_and_times_are_in_their_unit(
    zprof: Zprof, browser: Browser
) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=3, units=4, start_ns=LATE_NS))
    assert zprof("timeline", "run.zprof").exit_code == 0
    browser.open(Path("run.timeline.html"))
    assert browser.run("return state.begin") > 29_000
    assert browser.text("#before").startswith("The recording began 30 s before the first step.")
    browser.click("#whole")
    assert browser.run("return state.begin") == 0
    labels = browser.run("return [...document.querySelectorAll('#memory-plot .xtick text')].map((each) => each.textContent)")
    assert "30 s" in labels and not any("ms" in label for label in labels)
    browser.click("#focus")
    assert browser.run("return state.begin") > 29_000
    written = browser.run("return [0, 0.0004, 0.12, 1, 999.7, 1250, 30000, 59999, 125000, 7260000].map(duration)")
    assert written == ["0 ms", "400 ns", "120 us", "1 ms", "1 s", "1.25 s", "30 s", "1 min 0 s", "2 min 5 s", "2 h 1 min"]
    assert browser.complaints() == [] and browser.requests() == []


@pytest.mark.slow
def test_a_model_much_smaller_than_the_process_has_a_scale_of_its_own(zprof: Zprof, browser: Browser) -> None:
    rss = [Row(RowKind.COUNTER, "rss", "", (200 << 20) + (number << 30), 1_000_000_000 + number) for number in range(1, 4)]
    write_trace(Path("run.zprof"), [*rss, *sample_rows(steps=2, units=3, level="alloc", start_ns=1_000_000_010)])
    assert zprof("timeline", "run.zprof").exit_code == 0
    browser.open(Path("run.timeline.html"))
    peak = browser.run("return viewOf(DATA.runs[0]).peak.total")
    held, measured = browser.run(
        "const made = document.getElementById('memory-plot').layout; return [made.yaxis.range[1], made.yaxis2.range[1]]"
    )
    assert peak <= held <= 1.2 * peak and measured == pytest.approx(1.1 * (3 << 30))
    assert browser.text("#band") == "lower band, with its own scale:"
    assert browser.run("return document.querySelectorAll('#memory-plot .ytick, #memory-plot .y2tick').length") > 4
    assert browser.complaints() == [] and browser.requests() == []


@pytest.mark.slow
def test_a_timeline_of_ranks_shows_one_or_all_of_them(zprof: Zprof, browser: Browser) -> None:
    for rank in range(2):
        rows = sample_rows(steps=2, units=3, start_ns=1_000_000_000 + rank * 1_000_000)
        write_trace(Path(f"run.{rank}.zprof"), rows, rank=rank, world=2)
    assert zprof("timeline", "run.0.zprof", "run.1.zprof").exit_code == 0
    browser.open(Path("run.timeline.html"))
    shown = "return [...document.querySelectorAll('section[id^=lanes-]')].filter((each) => !each.hidden).length"
    assert browser.run(shown) == 2
    browser.press("#rank", "rank 1")
    assert browser.run(shown) == 1
    assert browser.run("return document.getElementById('lanes-0').hidden")
    assert browser.complaints() == [] and browser.requests() == []


#: Where the dots of a figure have a rank's, in pixels of the chart of all ranks.
DOT = """
const at = ranking.columns.findIndex((places) => RANKS.rank[places[0]] === arguments[0]);
const figure = RANKS.figures.findIndex((each) => each.name === arguments[1]);
return [LEFT + ((at + 0.5) / ranking.columns.length) * 0.88 * plotWidth(), 4 + (figure + 0.5) * BLOCK];
"""


@pytest.mark.slow
def test_a_page_of_many_ranks_names_each_of_them_and_shows_what_ran_on_a_few(zprof: Zprof, browser: Browser) -> None:
    job(Path("runs"), 50)
    assert zprof("timeline", "runs", "-o", "page.html").exit_code == 0
    browser.open(Path("page.html"))
    assert browser.text("#ranks .say") == "2 ranks stand out of 50"
    marks = "return [...document.querySelectorAll('#ranks-plot .scatterlayer .point')].map((each) => each.getBBox().width)"
    sizes = browser.run(marks)
    assert len(sizes) == 4 * 50 and sum(size > min(sizes) * 2 for size in sizes) == 3, "three dots stand out"
    rows = "return [...document.querySelectorAll('#ranks-body tr')].map((row) => row.innerText)"
    first, second, *others = browser.run(rows)
    assert first.split()[:2] == [str(LARGE), "node1"] and "device peak +300%" in first and first.endswith("yes")
    assert second.split()[:2] == [str(SLOW), "node0"] and "own work +46%" in second and len(others) == 14

    browser.hover_at("#ranks-plot", *browser.run(DOT, SLOW, "own work"))
    assert browser.text("#tip").startswith(f"rank {SLOW} on node0") and "own work 95.2 ms" in browser.text("#tip")
    browser.click_at("#ranks-plot", *browser.run(DOT, SLOW, "own work"))
    assert browser.text("#panel-title") == f"rank {SLOW} on node0" and "Stands out in own work" in browser.text("#panel-body")
    browser.click("#rank-lanes")
    sections = "[...document.querySelectorAll('section[id^=lanes-]')]"
    (lanes,) = browser.run(f"return {sections}.filter((each) => !each.hidden).map((each) => each.innerText)")
    assert lanes.startswith(f"What ran, rank {SLOW}") and "own work +46%" in lanes

    browser.press("#ranks-order", "farthest")
    browser.click_at("#ranks-plot", *browser.run(DOT, 20, "step"))
    assert browser.text("#panel-title") == "rank 20 on node2"
    assert browser.text("#rank-command") == "zprof timeline runs --rank 20"
    browser.click("#ranks-more")
    assert len(browser.run(rows)) == 50
    assert browser.complaints() == [] and browser.requests() == []


@pytest.mark.slow
def test_more_ranks_than_columns_still_show_the_one_that_stands_out(zprof: Zprof, browser: Browser) -> None:
    job(Path("runs"), 50)
    assert zprof("timeline", "runs", "-o", "page.html").exit_code == 0
    text = Path("page.html").read_text(encoding="utf-8")
    data = data_of(Path("page.html"))
    data["ranks"] = repeated(data["ranks"], 100)
    Path("page.html").write_text(with_data(text, data), encoding="utf-8")
    browser.open(Path("page.html"))
    assert browser.run("return [ranking.columns.length, Math.max(...ranking.columns.map((each) => each.length))]") == [1200, 5]
    place = "return ranking.columns.findIndex((places) => places.includes(arguments[0]))"
    at = browser.run(place, LARGE)
    x = browser.run("return LEFT + ((arguments[0] + 0.5) / 1200) * 0.88 * plotWidth()", at)
    browser.hover_at("#ranks-plot", x, browser.run("return 4 + 3.5 * BLOCK"))
    assert browser.text("#tip").startswith(f"rank {LARGE} on node1") and "the farthest of" in browser.text("#tip")
    assert browser.complaints() == []


def repeated(ranks: dict[str, Any], times: int) -> dict[str, Any]:
    """As many more ranks like these, none of which stands out."""

    def packed(values: NDArray[Any], kind: str) -> dict[str, str]:
        return {"t": kind, "b": base64.b64encode(values.tobytes()).decode()}

    count = ranks["count"] * times
    usual = [at for at in range(ranks["count"]) if at not in (LARGE, SLOW)]
    figures = []
    for figure in ranks["figures"]:
        columns = {}
        for name, kind in (("values", "f8"), ("apart", "f4")):
            first = column(figure[name])
            columns[name] = packed(np.append(first, np.resize(first[usual], count - len(first))), kind)
        figures.append(figure | columns)
    numbers = np.arange(count, dtype=np.uint32)
    host = np.append(column(ranks["host"]), np.zeros(count - ranks["count"], np.uint32))
    order = np.append(column(ranks["farthest"]), numbers[ranks["count"] :])
    whole = {"count": count, "rank": packed(numbers, "u4"), "host": packed(host, "u4"), "farthest": packed(order, "u4")}
    return ranks | whole | {"figures": figures}


def with_data(text: str, data: dict[str, Any]) -> str:
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode())).decode()
    return re.sub(r'(id="data">)[^<]*', lambda found: found[1] + packed, text)


@pytest.mark.slow
def test_a_run_too_long_for_a_page_says_what_was_merged_and_keeps_steps_whole(
    zprof: Zprof, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_timeline, "MOST_SPANS", 400)
    rows = list(sample_rows(steps=30, units=6))
    samples = [
        Row(RowKind.COUNTER, f"nvml {what}", "gpu0", value * (number + 1), 1_000_000_000 + number * 100_000_000)
        for number in range(8)
        for what, value in (("utilisation", 10), ("power", 90_000), ("pcie rx", 1 << 30))
    ]
    write_trace(Path("run.zprof"), rows + samples, device="cuda:0")
    result = zprof("timeline", "run.zprof")
    assert "are merged" in result.stdout
    browser.open(Path("run.timeline.html"))
    assert browser.run("return !document.getElementById('device').hidden")
    assert "merged with their neighbours" in browser.run("return document.querySelector('main > .note').textContent")
    browser.click("#whole-windows button")
    assert browser.run(ALONE)
    assert browser.complaints() == [] and browser.requests() == []


@pytest.mark.slow
def test_a_flamegraph_is_drawn_and_looked_into(zprof: Zprof, browser: Browser) -> None:
    write_trace(Path("run.zprof"), renamed(sample_rows(steps=2, units=6, level="alloc")), level="alloc")
    assert zprof("flamegraph", "run.zprof").exit_code == 0
    browser.open(Path("run.flamegraph.html"))
    slices = "return document.querySelectorAll('#flame .slice').length"
    assert browser.run(slices) > 10
    browser.click("#flame .slice:nth-child(2)")
    assert browser.text("#panel-title") == "Details"
    assert browser.run("return state.root") > 0
    browser.click("#whole")
    browser.press("#search", "<script>")
    assert " found, " in browser.text("#found")
    browser.click("#kind")
    assert browser.run("return document.querySelectorAll('#flame .treemaplayer .slice').length") > 10
    browser.click("#theme")
    browser.press("#tier", "host")
    assert "host" in browser.text("#crumbs")
    assert browser.complaints() == [] and browser.requests() == []


#: The text of the summary as it is shown, a row each.
SHOWN = """
return [...document.querySelectorAll("#summary .findings tr")].map((row) => [...row.children].map((cell) => cell.innerText));
"""


@pytest.mark.slow
def test_the_first_thing_on_a_page_is_the_summary_of_the_report(zprof: Zprof, browser: Browser) -> None:
    rows = renamed(sample_rows(level="alloc", start_ns=LATE_NS))
    write_trace(Path("run.zprof"), rows, level="alloc", notes={"policy": {"text": json.dumps({"budget": {"host": MIB}})}})
    assert zprof("timeline", "run.zprof").exit_code == 0
    report = json.loads(zprof("report", "run.zprof", "--json").stdout)
    browser.open(Path("run.timeline.html"))
    told = [
        [each["about"], each["figure"], each["what"] + (f"\nremedy: {each['remedy']}" if each["remedy"] else "")]
        for each in report["summary"]
    ]
    # innerText has one blank for several, and none of what cannot be seen.
    assert [[" ".join(cell.split()) for cell in row] for row in browser.run(SHOWN)] == [
        [" ".join(cell.split()) for cell in row] for row in told
    ]
    acted = [each["about"] for each in report["summary"] if each["act"]]
    assert {"waits", "host"} <= set(acted)
    assert browser.run("return [...document.querySelectorAll('.findings .act th')].map((each) => each.innerText)") == acted
    shown = "[...document.querySelectorAll('section:not([hidden])')]"
    tops = dict(browser.run(f"return {shown}.map((each) => [each.id, each.getBoundingClientRect().top])"))
    assert tops["summary"] < 120 and all(top > tops["summary"] for name, top in tops.items() if name != "summary")
    assert browser.complaints() == [] and browser.requests() == []


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it, of "#rrggbb"."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def drawn_in(pixels: NDArray[np.uint8], color: str) -> int:
    """How many pixels have just about that colour."""
    wanted = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])
    return int((np.abs(pixels.astype(int) - wanted).max(axis=2) <= 3).sum())


@pytest.mark.slow
def test_a_page_is_light_or_dark_as_the_system_is_and_draws_each_category_in_both(zprof: Zprof, browser: Browser) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=3, units=6, level="alloc"), level="alloc")
    assert zprof("timeline", "run.zprof").exit_code == 0 and zprof("flamegraph", "run.zprof").exit_code == 0
    names = ("card", "ink", "soft", "wait", "parameter", "gradient", "activation", "optimizer")
    try:
        for scheme in ("light", "dark"):
            browser.prefers(scheme)
            browser.open(Path("run.timeline.html"))
            colors = dict(zip(names, browser.run("return arguments[0].map(color)", names), strict=True))
            assert contrast(colors["ink"], colors["card"]) > 7 and contrast(colors["soft"], colors["card"]) > 4.5
            assert contrast(colors["wait"], colors["card"]) > 3
            summary = browser.pixels("#summary")
            bright = bool(summary.mean() > 128)
            assert bright is (scheme == "light") and drawn_in(summary, colors["card"]) > summary.size / 3 / 2
            memory = browser.pixels("#memory-plot")
            for category in ("parameter", "gradient", "activation"):
                assert drawn_in(memory, colors[category]) > 200, category
            assert drawn_in(browser.pixels("#lanes-plot-0"), colors["wait"]) > 20
            browser.open(Path("run.flamegraph.html"))
            assert drawn_in(browser.pixels("#flame"), colors["activation"]) > 2000
            assert browser.complaints() == [] and browser.requests() == []
    finally:
        browser.prefers("light")


#: Pairs of labels of one chart that lie over one another, in pixels of the screen.
OVERLAPPING = """
const boxes = [...document.querySelectorAll(arguments[0])].filter((each) => each.textContent.trim()).map((each) => {
  const box = each.getBoundingClientRect();
  return { text: each.textContent, left: box.left + 1, right: box.right - 1, top: box.top + 2, bottom: box.bottom - 2 };
}).filter((box) => box.right > box.left && box.bottom > box.top);
const found = [];
for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
  const a = boxes[i], b = boxes[j];
  if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) found.push([a.text, b.text]);
}
return [boxes.length, found];
"""


def overlapping_reads(begin_ns: int) -> Iterator[Row]:
    """More at once than the lane has rows, each long enough for a label."""
    for number in range(6):
        yield Row(RowKind.BEGIN, "disk read", f"optim/block.{number}", MIB, begin_ns + number * 10_000_000)
    for number in range(6):
        yield Row(RowKind.END, "disk read", f"optim/block.{number}", MIB, begin_ns + 300_000_000 + number * 10_000_000)


@pytest.mark.slow
def test_labels_of_spans_that_lie_over_one_another_do_not(zprof: Zprof, browser: Browser) -> None:
    rows = list(sample_rows(steps=2, units=3))
    write_trace(Path("run.zprof"), [*rows, *overlapping_reads(rows[-1].time_ns)])
    assert zprof("timeline", "run.zprof").exit_code == 0
    browser.open(Path("run.timeline.html"))
    count, overlapping = browser.run(OVERLAPPING, "#lanes-plot-0 .textpoint text")
    assert count > 1 and overlapping == []


@pytest.mark.slow
@pytest.mark.parametrize("units", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_units_can_be_read_sorted_and_found(zprof: Zprof, browser: Browser, units: int) -> None:
    write_trace(Path("run.zprof"), sample_rows(steps=2, units=units), level="events")
    assert zprof("timeline", "run.zprof").exit_code == 0 and zprof("flamegraph", "run.zprof").exit_code == 0
    browser.open(Path("run.timeline.html"))
    for labels in ("#lanes-plot-0 .textpoint text, #lanes-plot-0 .ytick text", "#memory-plot text"):
        count, overlapping = browser.run(OVERLAPPING, labels)
        assert count > 3 and overlapping == []
    rows = "return [...document.querySelectorAll('#units-body tr')].map((row) => row.firstChild.textContent)"
    assert len(browser.run(rows)) == 50 and browser.text("#units-more") == f"Show all {units:,}"
    browser.click("#units-more")
    assert len(browser.run(rows)) == units
    for words, reverse in (("descending", True), ("ascending", False)):
        if words not in str(browser.run("return document.querySelector('[data-column=longest]').getAttribute('aria-sort')")):
            browser.click("[data-column=longest] button")
        order = browser.run("return sortedUnits().map((row) => UNITS.longest_ms[row])")
        assert order == sorted(order, reverse=reverse)
        names = browser.run("return sortedUnits().map((row) => UNITS.name[row])")
        assert browser.run(rows) == names
    browser.press("#search", "layers.99")
    found = [f"model.layers.{number}" for number in range(units) if str(number).startswith("99")]
    assert sorted(browser.run(rows)) == sorted(found)

    browser.open(Path("run.flamegraph.html"))
    count, overlapping = browser.run(OVERLAPPING, "#flame text")
    assert count > 12 and overlapping == [] and "smaller" not in browser.text("#flame")
    groups = browser.run("return now().name.flatMap((name, node) => (isGroup(node) ? [node] : []))")
    assert browser.run("return members(now().name.indexOf('layers')).length") == units and len(groups) > 10
    browser.run("choose(arguments[0])", groups[0])
    browser.settle()
    of_group = browser.run("return members(arguments[0]).length", groups[0])
    assert browser.run("return document.querySelectorAll('#flame .slice').length") > of_group
    assert browser.run("return document.querySelectorAll('#largest-body tr').length") == of_group
    assert browser.complaints() == [] and browser.requests() == []


def test_columns_come_back_as_they_were_packed() -> None:
    from zprof.show.pages.page import packed

    for kind in ("uint8", "uint16", "uint32", "float32", "float64"):
        values = np.arange(9).astype(kind)
        read = packed(values)
        found = np.frombuffer(base64.b64decode(read["b"]), dtype=np.dtype(kind).newbyteorder("<"))
        assert found.tolist() == values.tolist()
