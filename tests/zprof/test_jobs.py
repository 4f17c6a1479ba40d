"""Jobs on a command line: ``module:function`` and ``file.py:function``, and every way to name one that cannot be loaded."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from zprof.commands.jobs import load_job
from zprof.problem import Misuse, Problem

JOB = """
def build():
    return "a model"

def step(model, micro_batch=2):
    if model is None:
        raise ValueError("no\\nmodel")
    return [model] * micro_batch

def job():
    return build, step

def three():
    return build, step, step

def broken():
    return {}["missing"]

def ended():
    raise SystemExit(3)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job lies, as the current folder; what loading it changes is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_job.py").write_text(JOB)
    monkeypatch.delitem(sys.modules, "my_job", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["my_job:job", "my_job.py:job", "my_job", "my_job.py", "./my_job.py:job"])
def test_a_job_is_a_module_or_a_file_with_or_without_a_function(folder: Path, name: str) -> None:
    job = load_job(name)
    assert (job.name, job.build(), job.step("m")) == (name, "a model", ["m", "m"])
    assert list(inspect.signature(job.step).parameters) == ["model", "micro_batch"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_job:jobb", "my_job:jobb: expected a function jobb in my_job, found none; did you mean job?"),
        ("my_job:number", "my_job:number: expected a function, found int"),
        ("my_job:three", r"expected that it returns \(build, step\), two functions, found \(function, function, function\)"),
        ("my_job:", "my_job:: expected module:function or file.py:function"),
        ("no_such_module_here:job", "no_such_module_here: expected a module, found none of that name here or installed"),
        ("json.no_such:job", "json.no_such: expected a module, found none named json.no_such"),
        ("missing.py:job", "missing.py: expected a file of Python, found no such file"),
        ("/:job", "/: expected a file of Python, found a folder, not a regular file"),
        ("a\0b.py", "expected a file of Python, found embedded null byte"),
        ("re", "re: expected functions build and step in it, or re:function"),
    ],
)
def test_what_names_no_job_is_wrong_usage(folder: Path, name: str, said: str) -> None:
    with pytest.raises(Misuse, match=said) as caught:
        load_job(name)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.message


def test_an_error_of_the_job_is_one_line_that_names_its_line(folder: Path) -> None:
    with pytest.raises(Problem, match=r"my_job\.py:17: my_job:broken raised KeyError: 'missing'$"):
        load_job("my_job:broken")
    with pytest.raises(Problem, match=r"my_job\.py:20: my_job:ended ended the process \(SystemExit: 3\)"):
        load_job("my_job:ended")
    with pytest.raises(Problem, match=r"my_job\.py:7: step of my_job\.py:job raised ValueError: no model$") as caught:
        load_job("my_job.py:job").step(None)
    assert caught.value.exit_code == 1
    with pytest.raises(Problem, match=r"my_job\.py:2: build of my_job\.py:job raised TypeError: build\(\) takes 0 positional"):
        load_job("my_job.py:job").build("more")  # type: ignore[call-arg]


def test_an_error_while_a_job_is_loaded_names_its_line_too(folder: Path) -> None:
    (folder / "bad.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(Problem, match=r"bad\.py:3: bad\.py raised JSONDecodeError: Expecting "):
        load_job("bad.py:job")
    (folder / "worse.py").write_text("x = 1\ndef (:\n")
    with pytest.raises(Problem, match=r"worse\.py:2: worse\.py raised SyntaxError: "):
        load_job("worse.py:job")
    (folder / "lacking.py").write_text("import no_such_module_here\n")
    with pytest.raises(Problem, match=r"lacking\.py:1: lacking raised ModuleNotFoundError: No module named 'no_such_"):
        load_job("lacking:job")


def test_a_file_may_have_the_name_of_a_library(folder: Path) -> None:
    (folder / "json.py").write_text(JOB)
    before = sys.modules["json"]
    assert load_job("json.py:job").build() == "a model"
    assert sys.modules["json"] is before and re is sys.modules["re"]
