"""Owns the view of a run that ``zprof run --live`` draws on the terminal while it waits for the script.

`zprof.commands.run` calls `watch`, and whoever else looks at a run from its beginning takes `Awaited`. It only reads the
growing trace, and one that cannot be read yet is simply not there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload.text import as_duration, as_size, counted
from zprof.analysis.coverage import NOT_MEASURED
from zprof.analysis.curves import NO_KEY
from zprof.analysis.following import RunFollower, Seen
from zprof.clock import now_ns
from zprof.rows import TraceError
from zprof.running.child import Child, Ending
from zprof.running.screen import Screen

__all__ = ["Awaited", "watch"]

_REFRESH_S = 0.25
_LOOK_NS = 1_000_000_000


def watch(arguments: Sequence[str], path: Path, also: Callable[[], None]) -> Ending:
    """Run `zprof.running.launch` and show its trace below what the script prints, on stderr; call ``also`` now and then."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    screen = Screen(console)
    run, seen, looked_ns = Awaited(path), None, 0
    child = Child(arguments, screen.outputs)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False) as live:
        screen.show()
        ending = None
        while ending is None:
            ending = child.wait(_REFRESH_S)
            if now_ns() - looked_ns > _LOOK_NS:
                looked_ns = now_ns()
                seen = run.look() or seen
                also()
            live.update(_drawn(seen, screen.unfinished), refresh=True)
        screen.close()
    return ending


class Awaited:
    """A trace that is begun from now on: an older run's may lie at its path until then."""

    def __init__(self, path: Path) -> None:
        self._path, self._since_ns = path, now_ns()
        self._follower: RunFollower | None = None

    def look(self) -> Seen | None:
        """The run as it is now; None where there is nothing of it yet."""
        try:
            follower = self._follower or RunFollower(self._path)
            if follower.began_ns < self._since_ns:
                follower.close()
                return None
            self._follower = follower
            return follower.look()
        except TraceError:
            self._follower = None
            return None


def _drawn(seen: Seen | None, unfinished: str) -> Any:
    """A few lines: tiers by category, then steps, transfers, waits and the largest units."""
    from rich.console import Group
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    parts: list[Any] = [Text.from_ansi(unfinished)] if unfinished else []
    if seen is None:
        return Group(*parts, Text("zprof: waiting for the first rows", style="dim"))
    text = f"zprof: {as_duration(round(seen.elapsed_s) * 1e9)}"
    if seen.steps:
        each = f" of {as_duration(seen.step_ms * 1e6)}" if seen.step_ms is not None else ""
        text += f", {counted(seen.steps, 'step')}{each}"
    if "rss" in seen.samples:
        text += f", rss {as_size(seen.samples['rss'])}"
    if seen.samples.get("children count"):
        nbytes = seen.samples.get("children pss") or seen.samples.get("children rss", 0)
        text += f", {seen.samples['children count']} child processes {as_size(nbytes)}"
    if seen.unmeasured is not None:
        text += f", waits {NOT_MEASURED}"
    elif seen.waited is not None and seen.waited >= 0.005:
        text += f", {seen.waited:.0%} of the time waited"
    parts.append(line(text, "bold"))
    for tier, most in seen.peaks.items():
        held = seen.categories[tier]
        of = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in held.items())
        parts.append(line(f"  {tier:<7}{as_size(sum(held.values())):>10}  most {as_size(most):>10}  {of}"))
    if seen.bandwidth:
        rates = ", ".join(f"{what} {as_size(int(speed))}/s" for what, speed in seen.bandwidth.items() if speed)
        parts.append(line(f"  moves  {rates}"))
    if seen.holding:
        largest = ", ".join(f"{unit.name or NO_KEY} {as_size(unit.nbytes)}" for unit in seen.holding)
        parts.append(line(f"  most   {largest}", "dim"))
    return Group(*parts)
