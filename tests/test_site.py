"""The documentation site is built without a warning, leads nowhere that is not there, and leaves nothing public out.

pytest calls it. It builds the site once, as ``make docs`` does, and reads the pages that come of it.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest
from pydantic import BaseModel

import zhooks
import zhooks.integrations
import zprof
from offload import errors
from offload.policy import Policy
from tests.support.paths import ROOT
from zprof.cli import main as zprof_command

NEEDED = ("mkdocs", "material", "mkdocstrings")
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason="the extra `docs` is not installed: pip install -e '.[docs]'"
)
#: Elements whose address a browser loads by itself, and the attribute that has it.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
#: Relations of a <link> that load nothing.
NAMED = {"canonical", "prev", "next", "edit"}


@dataclass
class Page(HTMLParser):
    """What a built page has: anchors, the addresses that it links to, and those that it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]) and given.get("rel") not in NAMED:
            self.loads.append(given[LOADED[tag]])

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    read = {}
    for path in sorted(site.rglob("*.html")):
        read[path] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    assert len(read) > 20
    return read


@pytest.fixture(scope="module")
def anchors(pages: dict[Path, Page]) -> set[str]:
    return set().union(*(page.ids for page in pages.values()))


def test_every_link_of_the_site_leads_to_a_page_and_a_heading_that_exist(site: Path, pages: dict[Path, Page]) -> None:
    # The page for addresses that do not exist is shown anywhere, so that its links start at the site's root.
    wrong = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        if path.name != "404.html"
        for address in page.links
        if not _leads_somewhere(address, path, pages)
    ]
    assert not wrong


def _leads_somewhere(address: str, path: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(address)
    if parts.scheme:
        return parts.scheme in ("https", "mailto")
    if not parts.path:
        target = path
    else:
        target = (path.parent / unquote(parts.path)).resolve()
        target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return False
    fragment = unquote(parts.fragment)
    return not fragment or target not in pages or fragment in pages[target].ids or fragment == "__skip"


def test_no_page_loads_anything_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    wrong = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        for address in page.loads
        if urlsplit(address).scheme not in ("", "data") or address.startswith("//")
    ]
    styles = [path for path in site.rglob("*.css") if "url(http" in path.read_text(encoding="utf-8")]
    assert not wrong and not styles


def test_every_public_name_has_an_entry_in_the_api_reference(anchors: set[str]) -> None:
    missing = [
        f"{module.__name__}.{name}"
        for module in (zhooks, zhooks.integrations, zprof)
        for name in module.__all__
        # zhooks.attach is a module and a function.
        if not {f"{module.__name__}.{name}", f"{getattr(module, name).__module__}.{name}"} & anchors
    ]
    assert not missing


def test_no_private_name_has_an_entry_in_the_api_reference(site: Path, pages: dict[Path, Page]) -> None:
    api = [page for path, page in pages.items() if path.is_relative_to(site / "reference" / "python")]
    assert len(api) > 5
    assert [name for page in api for name in page.ids if "._" in name] == []


def test_every_method_of_an_attachment_has_an_entry(anchors: set[str]) -> None:
    public = {name for name in dir(zhooks.Attachment) if not name.startswith("_")}
    # Those are described with the class.
    public -= {"model", "policy", "rank"}
    assert {name for name in public if f"zhooks.Attachment.{name}" not in anchors} == set()


def test_every_argument_of_what_zhooks_offers_is_described() -> None:
    functions = {name: getattr(zhooks, name) for name in zhooks.__all__}
    methods = {name: inspect.getattr_static(zhooks.Attachment, name) for name in dir(zhooks.Attachment)}
    offered = {
        name: each
        for name, each in (functions | methods).items()
        if inspect.isfunction(each) and not name.startswith("_")
    }
    assert len(offered) > 30
    missing = [
        f"{name}: {argument}"
        for name, each in offered.items()
        for argument in inspect.signature(each).parameters
        if argument != "self" and not re.search(rf"^    \*{{0,2}}{argument}: ", inspect.getdoc(each) or "", re.MULTILINE)
    ]
    assert not missing


def commands(command: click.Command = zprof_command, path: str = "zprof") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}")


def test_every_command_and_option_has_an_entry_in_the_cli_reference(site: Path, pages: dict[Path, Page]) -> None:
    page = pages[site / "reference" / "cli" / "index.html"]
    words = set(" ".join(page.text).replace(",", " ").replace("/", " ").split())
    known = list(commands())
    assert len(known) > 20
    for path, command in known:
        assert path.replace(" ", "-") in page.ids
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        assert words.issuperset(name for option in options for name in option.opts), path


def test_every_key_of_the_policy_is_on_its_page(site: Path, pages: dict[Path, Page]) -> None:
    text = "".join(pages[site / "reference" / "policy" / "index.html"].text)
    for name, value in Policy():
        if isinstance(value, BaseModel):
            assert f"[{name}]" in text and all(key in text for key in type(value).model_fields), name
        else:
            assert name in text


def test_every_error_has_a_section_and_a_class(site: Path, pages: dict[Path, Page]) -> None:
    explained = pages[site / "reference" / "errors" / "index.html"].ids
    classes = pages[site / "reference" / "python" / "errors" / "index.html"].ids
    for name in errors.__all__:
        assert f"zhooks.{name}" in classes and name.lower() in explained, name
