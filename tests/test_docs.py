"""The pages tell the truth: programs run, policies load, outputs are what is printed, links and commands exist.

pytest calls it. All Python blocks of a page are one program, run in a process of its own at world size 1 in an empty
folder (the README's in a fresh interpreter, others, and both sides of a diff, in one that has imported torch), warnings
being errors, and the README's script also on two ranks, and without its new lines. A ``text`` block right after a Python
block is what that block prints. A ``diff`` block is Python too: the lines it adds run with the program, and without them it
prints the same. It never edits a page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from pydantic import BaseModel
from torch.distributed.fsdp import _fully_shard as fully_shard

from offload import errors
from offload.policy import IgnoredKeys, Policy, written
from offload.policy.deepspeed_keys import OTHER
from tests.support.doc_pages import DOCS, PAGES, README, name_of, text_of
from tests.support.forked import launch, python
from tests.support.paths import ROOT
from tests.support.torches import not_with_2_8

LANGUAGES = {"python", "diff", "toml", "json", "sh", "text"}

# Runs in the other process: executes each block in one namespace and says, as JSON, what each printed.
DRIVER = """
import contextlib, io, json, sys
printed, space = [], {"__name__": "__main__"}
for page, line, text in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        # Blank lines before the block, so that a traceback shows the page's own line.
        exec(compile("\\n" * line + text, page, "exec", dont_inherit=True), space)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; ``line`` is that of its fence, counted from 1, ``after`` the block it directly follows.

    ``title``: the name of the file that it shows.
    """

    language: str
    line: int
    text: str
    after: Block | None = None
    title: str = ""


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    fence: tuple[str, int] | None = None
    body: list[str] = []
    near = False
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if fence is None and line.startswith("```"):
            fence, body = (line[3:].strip(), number), []
        elif fence is not None and line == "```":
            before = found[-1] if near and found else None
            language, _, options = fence[0].partition(" ")
            titled = re.search(r'title="([^"]+)"', options)
            found.append(Block(language, fence[1], "\n".join(body) + "\n", before, titled[1] if titled else ""))
            fence, near = None, True
        elif fence is not None:
            body.append(line)
        elif line.strip():
            near = False
    assert fence is None, f"{name_of(page)}:{fence}: the block does not end"
    return found


def of_language(page: Path, language: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == language]


def programs(page: Path, without: str = "-") -> list[Block]:
    """The Python of a page, in order; of a ``diff`` block the lines that do not begin with ``without``."""
    return [block if block.language == "python" else one_side(block, without) for block in blocks(page) if runs(block)]


def runs(block: Block) -> bool:
    return block.language in ("python", "diff")


def one_side(block: Block, without: str) -> Block:
    # A line of the other side becomes a blank one, so that a traceback shows the page's own line.
    lines = ("" if line.startswith(without) else line[1:] for line in block.text.splitlines())
    return replace(block, text="\n".join(lines) + "\n")


PARALLEL = DOCS / "how-to" / "parallel.md"
#: Its pipeline has one rank, which sends to itself.
ALONE = pytest.param(PARALLEL, marks=not_with_2_8("a stage of a pipeline cannot send to its own rank"))
with_python = pytest.mark.parametrize(
    "page", [ALONE if p == PARALLEL else p for p in PAGES if of_language(p, "python")], ids=name_of
)
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@with_python
def test_the_programs_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    write_policies(page, tmp_path)
    printed = run(page, programs(page), tmp_path, fresh if page == README else forked)
    for block in of_language(page, "text"):
        if block.after is not None and block.after.language == "python":
            assert printed[block.after.line] == block.text, f"{name_of(page)}:{block.line}: the program printed otherwise"


def script() -> Block:
    [block] = [block for block in of_language(README, "python") if block.text.startswith("# train.py\n")]
    return block


def test_the_readmes_script_prints_the_same_without_its_new_lines(tmp_path: Path) -> None:
    block = script()
    old = [line for line in block.text.splitlines() if not re.search("# new(:|$)", line)]
    assert len(old) < len(block.text.splitlines()) and not any("zhooks" in line or "attachment" in line for line in old)
    plain = run(README, [replace(block, text="\n".join(old) + "\n")], tmp_path, forked)
    assert plain == run(README, [block], tmp_path, forked) and plain[block.line].count("loss ") == 10


def test_the_readmes_script_runs_on_two_ranks_too(tmp_path: Path) -> None:
    block = script()
    (tmp_path / "train.py").write_text(block.text, encoding="utf-8")
    told = {**os.environ, "TORCHELASTIC_RUN_ID": "readme"}
    ranks = launch(2, str(tmp_path / "train.py"), at=tmp_path, warn=("error", Warning), environment=told)
    assert [(rank.returncode, rank.stderr) for rank in ranks] == [(0, ""), (0, "")]
    assert ranks[0].stdout.count("loss ") == 10 and ranks[1].stdout == ""
    saved = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert saved == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


with_diff = pytest.mark.parametrize("page", [p for p in PAGES if of_language(p, "diff")], ids=name_of)


@with_diff
def test_what_a_diff_adds_changes_nothing_that_is_printed(page: Path, tmp_path: Path) -> None:
    write_policies(page, tmp_path)
    first = of_language(page, "diff")[0].line
    until = [[block for block in programs(page, without) if block.line <= first] for without in "-+"]
    changed, plain = (run(page, program, tmp_path, forked)[first] for program in until)
    assert plain and changed == plain, f"{name_of(page)}:{first}"


def run(page: Path, program: list[Block], at: Path, by: Callable[[str, Path], CompletedProcess[str]]) -> dict[int, str]:
    """What each block prints, by its line, when all are run as one program."""
    done = by(json.dumps([(name_of(page), block.line, block.text) for block in program]), at)
    assert done.returncode == 0, f"{name_of(page)}:\n{done.stderr}"
    return dict(zip((block.line for block in program), json.loads(done.stdout), strict=True))


def forked(given: str, at: Path) -> CompletedProcess[str]:
    """In a process that has imported torch and zhooks."""
    return python("-c", DRIVER, at=at, given=given, warn=("error", Warning))


def fresh(given: str, at: Path) -> CompletedProcess[str]:
    """In a process that has imported nothing, so that what zhooks imports may not warn either."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVER],
        input=given,
        cwd=at,
        capture_output=True,
        text=True,
        timeout=300,
    )


def write_policies(page: Path, folder: Path) -> list[Path]:
    """Put each TOML and JSON block into the folder, under its title, or the name in its first line where it has one."""
    made = []
    for block in [block for block in blocks(page) if block.language in ("toml", "json")]:
        named = re.match(r"# ([\w.-]+\.toml)\n", block.text)
        path = folder / (block.title or (named[1] if named else f"line{block.line}.{block.language}"))
        path.write_text(block.text, encoding="utf-8")
        made.append(path)
    return made


@every_page
def test_every_policy_of_a_page_loads(page: Path, tmp_path: Path) -> None:
    for path in write_policies(page, tmp_path):
        with warnings.catch_warnings():
            # What of a DeepSpeed configuration has no counterpart.
            warnings.simplefilter("ignore", IgnoredKeys)
            Policy.load(path)


@every_page
def test_no_block_escapes_these_tests(page: Path) -> None:
    strange = [
        f"{name_of(page)}:{block.line}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES
    ]
    assert not strange


@every_page
def test_commands_name_targets_and_files_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = text_of(page)
    commands = "\n".join(block.text for block in of_language(page, "sh")) + "\n".join(re.findall(r"`([^`\n]+)`", text))
    for target in re.findall(r"^make ([\w-]+)", commands, re.MULTILINE):
        assert target in targets, f"{name_of(page)}: make {target}"
    for script in re.findall(r"(?:examples|benchmarks)/\w+\.py", text):
        assert (ROOT / script).is_file(), f"{name_of(page)}: {script}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


def keys() -> Iterator[tuple[str, str, str]]:
    """Table, name and default of every key of the policy, as a file has it; the table of `stage` is empty."""
    policy = Policy()
    for name, value in policy:
        if isinstance(value, BaseModel):
            yield from ((name, key, "unset" if held is None else written(type(value), key, held)) for key, held in value)
        elif name != "rule":
            yield "", name, written(Policy, name, value)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of a page."""
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_policy_page_names_every_key_with_its_default() -> None:
    page = sections(DOCS / "reference" / "policy.md")
    for table, key, default in keys():
        row = f"| `{key}` | `{default}` |"
        homes = [text for heading, text in page.items() if (f"[{table}]" if table else "stage") in heading]
        assert any(row in text for text in homes), f"docs/reference/policy.md: expected {row} under [{table}]"


def test_the_policy_page_names_no_key_that_is_not_there() -> None:
    known = {key for _, key, _ in keys()} | {"extends", "match"}
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference" / "policy.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows and set(rows) <= known, set(rows) - known


def test_the_deepspeed_page_says_what_takes_the_place_of_every_key() -> None:
    rows = {line for line in (DOCS / "how-to" / "from-deepspeed.md").read_text(encoding="utf-8").splitlines() if line}
    missing = [
        row
        for table, keys in OTHER.items()
        for key, other in keys.items()
        if (row := f"| `{'.'.join((*table, key))}` | {other.instead} |") not in rows
    ]
    assert OTHER and not missing


def test_the_page_on_other_libraries_tests_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "explanation" / "peers-tests.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*test_\w+\*?|\w+/)`", page))
    folders = {name: ROOT / "tests" / ("zhooks" if "/" in name else "parity") for name in named}
    missing = [name for name, folder in folders.items() if not list(folder.glob(name if name.endswith("/") else f"{name}.py"))]
    assert len(named) > 30 and not missing


def test_the_errors_page_has_a_section_for_every_error() -> None:
    assert set(errors.__all__) <= set(sections(DOCS / "reference" / "errors.md"))


def test_the_architecture_page_names_every_file() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    files = [path for folder in ("zhooks", "offload", "tools/zprof") for path in (ROOT / folder).rglob("*.py")]
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.name != "__init__.py" and f"`{path.name}`" not in text and f"`{'/'.join(path.parts[-2:])}`" not in text
    ]
    assert files and not missing


@pytest.mark.parametrize("page", ["architecture.md", "explanation/fsdp2.md"])
def test_a_page_on_the_code_names_no_file_that_is_not_there(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    folders = [*(ROOT / name for name in ("zhooks", "offload", "tools", "tests")), Path(fully_shard.__file__).parent]
    files = {f"/{path.as_posix()}": path for folder in folders for path in folder.rglob("*.py")}
    for name, symbol in re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", text):
        found = [path for whole, path in files.items() if whole.endswith(f"/{name}")]
        assert found, name
        defined = re.compile(rf"(def|class) {symbol}\b")
        assert not symbol or any(defined.search(path.read_text(encoding="utf-8")) for path in found), f"{name}: {symbol}"
