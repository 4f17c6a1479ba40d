"""Every page of the docs: a ``zprof`` command it writes exists, and so does every option it gives one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.doc_pages import DOCS, PAGES, name_of, text_of
from zprof.cli import COMMANDS, main

#: Pages on which an option that stands alone is one of zprof's.
OWN = {"zprof.md", "trace-format.md"}


def commands_of(text: str) -> Iterator[tuple[int, str]]:
    """(line, code) of every piece of code, continued lines joined."""
    fenced, begun, joined = False, 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            begun = begun if joined else number
            joined += line.removesuffix("\\")
            if not line.endswith("\\"):
                yield begun, joined
                joined = ""
        else:
            yield from ((number, code) for code in re.findall(r"`([^`]+)`", line))


def zprof_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) behind each ``zprof`` that is called; of a pipeline or a list of commands its own part."""
    for number, code in commands_of(text):
        for part in re.split(r"\s(?:\||&&|;)\s|\s#|;\s", code):
            lexer = shlex.shlex(part, posix=True, punctuation_chars="|")
            lexer.whitespace_split, lexer.commenters = True, ""
            try:
                words = list(lexer)
            except ValueError:
                continue
            # Called: at the beginning, behind an assignment or a launcher's -m.
            at = next((at for at, word in enumerate(words) if word == "zprof" and _called(words[:at])), None)
            if at is not None:
                yield number, words[at + 1 :]


def _called(before: list[str]) -> bool:
    return not before or before[-1] == "-m" or all("=" in word or word in ("nice", "sudo", "timeout", "$") for word in before)


def unknown(words: list[str]) -> list[str]:
    """What of a command line ``zprof`` does not know; what follows the script of ``zprof run`` is the script's."""
    command: click.Command = main
    found: list[str] = []
    context = click.Context(main, help_option_names=["-h", "--help"])
    takes_value = False
    for word in words:
        if takes_value:
            takes_value = False
        elif word.startswith("-") and word != "-" and not re.fullmatch(r"-\d+", word):
            named = _options(command, context).get(word.partition("=")[0])
            if named is None:
                found.append(f"{command.name} {word}")
            else:
                takes_value = not (named.is_flag or named.count or "=" in word)
        elif isinstance(command, click.Group):
            inner = command.get_command(context, word) if re.fullmatch(r"[a-z][a-z-]*", word) else None
            if inner is None:
                return found if not re.fullmatch(r"[a-z][a-z-]*", word) else [*found, f"zprof {word}"]
            command, context = inner, click.Context(inner, parent=context)
        elif command.name == "run":
            return found
    return found


def _options(command: click.Command, context: click.Context) -> dict[str, click.Option]:
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    return {name: each for each in options for name in (*each.opts, *each.secondary_opts)}


def every_option(command: click.Command = main) -> set[str]:
    context = click.Context(command, help_option_names=["-h", "--help"])
    group = command if isinstance(command, click.Group) else None
    inner = [group.get_command(context, name) for name in group.list_commands(context)] if group is not None else []
    return set(_options(command, context)).union(*(every_option(each) for each in inner if each is not None))



@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_of_zprof_on_a_page_exists(page: Path) -> None:
    wrong = [f"{name_of(page)}:{line}: {each}" for line, words in zprof_lines(text_of(page)) for each in unknown(words)]
    assert not wrong


def test_an_option_that_stands_alone_on_zprofs_pages_is_one_of_its_commands() -> None:
    known = every_option()
    for name in OWN:
        for line, code in commands_of((DOCS / name).read_text()):
            if code.startswith("-") and not code.startswith("---"):
                assert code.split()[0].partition("=")[0] in known, f"{name}:{line}: {code}"


def test_the_page_of_zprof_is_read_at_all() -> None:
    lines = list(zprof_lines((DOCS / "zprof.md").read_text()))
    assert {words[0] for _, words in lines if words} >= {"run", "report", "frag", "checkpoint", "check", "export"}
    assert unknown(["report", "run.zprof", "--nope"]) == ["report --nope"] and unknown(["nope"]) == ["zprof nope"]
    assert unknown(["checkpoint", "show", "x", "--nope"]) == ["show --nope"]
    assert unknown(["run", "--level", "alloc", "train.py", "--nope"]) == [] and set(COMMANDS) >= {"run"}
