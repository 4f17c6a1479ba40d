"""Owns the shell of a page: one HTML file with its data, plotly.js and its scripts in it, packed, that asks no network.

``zprof timeline`` and ``zprof flamegraph`` build their data and call `page`. It never puts a name from a trace into markup or
into a script: names travel as packed JSON, whose letters mean nothing to HTML, and the scripts set them as text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import CapabilityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["packed", "page", "page_path", "plotly_source"]

#: How an array travels: the letter of its JavaScript view. All little-endian.
_VIEWS = {"uint8": "u1", "uint16": "u2", "uint32": "u4", "float32": "f4", "float64": "f8"}
#: Past the title, nothing here is filled in with what a trace says.
_SHELL = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="zprof">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<noscript><p>This page draws itself with the scripts inside it, which are switched off here.</p></noscript>
<div id="page"></div>
<script type="application/gzip" id="data">{data}</script>
<script type="application/gzip" id="plotly">{plotly}</script>
<script type="application/gzip" id="drawing">{drawing}</script>
<script>{script}</script>
</body>
</html>
"""


def packed(values: NDArray[Any]) -> dict[str, str]:
    """An array as the page's script reads it: the letter of its type and its bytes, little-endian, in base64."""
    return {
        "t": _VIEWS[values.dtype.name],
        "b": base64.b64encode(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()).decode("ascii"),
    }


def plotly_source() -> str:
    """plotly.js as the page runs it, 4.8 MB.

    Raises:
        CapabilityError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise CapabilityError("plotly: needed for pages, not installed; pip install 'zhooks[pages]'") from None
    # As HTML's parser and a browser's own decoder hand it on, so that its hash holds.
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


def page(title: str, data: Mapping[str, Any], *, scripts: Sequence[str]) -> str:
    """The whole page.

    Args:
        title: any text.
        data: what the scripts read; arrays through `packed`.
        scripts: names of package files, run in this order after ``page.js``, and after plotly.js.
    """
    plotly, plotly_digest = _plotly()
    drawing = "".join(f"{_file(name)}\n" for name in ("page.js", *scripts))
    script = _inline(_file("unpack.js"))
    # Only these scripts run, known by their hashes, so that a mistake in escaping would still run nothing. Those of the first
    # two are of what was unpacked: unpack.js puts it into the page as a script of its own.
    hashes = " ".join((plotly_digest, _digest(drawing), _digest(script)))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    return _SHELL.format(
        policy=policy,
        title=html.escape(_scalar(title)),
        style=_file("page.css"),
        data=_gzipped(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        plotly=plotly,
        drawing=_gzipped(drawing),
        script=script,
    )


def page_path(runs: Sequence[Path], kind: str) -> Path:
    """Where the page of ``runs`` goes unless said: beside the first run, run.0.zprof -> run.0.timeline.html."""
    first = runs[0] if runs[0].name not in ("", "..") else runs[0].resolve()
    names = [run.name.removesuffix(".zprof") for run in (first, *runs[1:])]
    # Not a path they share but a beginning: run.0 and run.1 are of "run".
    shared = "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False)))
    if len(names) > 1:
        shared = re.sub(r"[.\-_]?r?\d*$", "", shared)
    return first.with_name(f"{shared or names[0]}.{kind}.html")


def _file(name: str) -> str:
    return resources.files("zprof.show.pages").joinpath(name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script as the parser of HTML hands it on unchanged, so that its hash holds."""
    script = script.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js packed, 2.0 MB, and its hash."""
    source = plotly_source()
    return _gzipped(source), _digest(source)


def _gzipped(text: str) -> str:
    """``text`` packed, in base64. The same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), mtime=0)).decode("ascii")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"


def _scalar(text: str) -> str:
    """``text`` without halves of surrogate pairs, which names of files may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")
