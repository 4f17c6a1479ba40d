"""Owns ``zprof report``: its options, and the choice between text for people and JSON for programs.

`zprof.cli` hangs it in. It finds out nothing and draws nothing itself, and needs numpy only once it is called.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import click

from zprof.commands.naming import named_or_latest
from zprof.commands.options import at_step
from zprof.problem import Misuse, Problem

__all__ = ["report"]

#: Of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@click.command()
@named_or_latest("runs", click.Path())
@click.option(
    "--by",
    type=click.Choice(["category", "module", "tier", "rank", "unit", "line", "op", "kernel"]),
    default="category",
    show_default=True,
    help="How bytes are grouped. A module is a path up to its first number (model.layers.3); a unit is the full key; a line "
    "is the one that allocated them (recorded at --level stack). Operators (recorded at --level ops) are grouped by op by "
    "default, or by kernel, module or unit.",
)
@click.option(
    "--at",
    default="peak",
    show_default=True,
    metavar="peak|step:N",
    callback=at_step,
    help="The moment: each tier's peak in the run, or in step N, counted from 0. Operators are those of the window of steps "
    "that contains it, otherwise of the first window.",
)
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1, 10_000),
    help="Rows of each table. The default is 24 for groups, 16 for ranks, 8 for modules, waits and skews; JSON has 20 or more.",
)
@click.option("--against", metavar="PLAN", type=click.Path(), help="Also compare it with a trace of zprof simulate.")
@click.option(
    "--hardware",
    metavar="PROFILE",
    help="Show MFU and HFU on this hardware: a profile's name or file (zprof hardware list). Default: the GPU's, if known.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs; its keys are listed above.")
def report(
    runs: tuple[str, ...], by: str, at: int | None, top: int | None, against: str | None, hardware: str | None, as_json: bool
) -> None:
    """Show where memory and time of a run went: what held memory at the peak and what the process holds beyond that, what the
    run waited for and the remedy, achieved bandwidths, and how ranks differ.

    RUN is a trace, or a folder of traces; several are the ranks of one run. The default is the newest run in this folder.

    \b
    Examples:
      zprof report
      zprof report run.zprof
      zprof report run.*.zprof --by module --top 50
      zprof report runs/ --rank 3
      zprof report runs/ --by rank --at step:12
      zprof report run.zprof --against plan.zprof
      zprof report run.zprof --json | jq .runs[0].tiers.device.bytes

    \b
    JSON: existing keys don't change while "version" is 1; new ones may be
    added. bytes is in bytes, at_s in seconds since the recording began; what
    is absent is null.
      version, by, at
      unreadable[]  file why: traces that are left out; exit code 1 says so too
      runs[]      file rank world simulated (the hardware, of a simulation) host device level level_chosen (why, where none
                  was named) argv versions duration_s
                  rows dropped_rows damage below_zero (series that end
                  below zero) bench_problem end{exit reason}
                  steps{count timed (those that times are of) marked_by first_unseen (why the first is only its
                  update, null where it is whole)}
        tiers{}   of device, host, disk, if used: bytes at_s step peak_bytes
                  budget_bytes memory_bytes (of a GPU, by its profile) groups{} categories{} not_recorded[] (the
                  categories that are in none of these, though they may be held)
                  holders[]{name bytes categories{}}
        residual  formula{}, or null; rows[]{name tier bytes peak_bytes
                  formula_bytes seen_by}; bytes in the part of the run
        reconciliation[]  name bytes said said_bytes against against_bytes
                  likely at_s; bytes is said_bytes less against_bytes
        growth[]  null if not seen; of what held more after each step than after
                  the one before: name (a line at level stack, else a module)
                  callers[] module tier category nbytes per_step (bytes a step)
                  first last (the steps between)
        compute   null if not seen: why is in unseen; a step: steps (counted) step_s
                  flops model_flops tokens samples dtypes{} uncounted[]
                  modules[]{name flops forward backward again bytes}
                  reached{hardware mfu hfu floor_s compute_s memory_s price
                  joules}, or null, and reached_why
        operators null if not seen: why is in unseen; of a step of title:
                  title counted first count step_ns by why left_out devices[]
                  error_ns stack skipped[] also[] in_operators_ns
                  rows[]{name calls host_ns device_ns flops_per_s mostly
                  beside (the thread, if not the step's)}
                  kernels[] as rows; between{} (module -> ns in no operator)
                  syncs[]{call where calls ns}
                  idle[]{device idle_ns step_ns reasons{} modules{}}
        rss       start_bytes peak_bytes at_s
        children  of processes under it, null if not sampled: seen (in all) most (at
                  once) bytes (what they share once) at_s rss_bytes tree_bytes (with
                  the process) shared_bytes unread zombies kinds[]{name most bytes
                  rss_bytes cpu_s busy queued} who[]{pid kind name bytes rss_bytes} who_at_s
        recorded_children[]  with --children record: file pid rank world began_s since
                  how end{exit reason}, null for one that was killed or is running
        measures{}  the names of `zprof check --max`; unseen{} has why one is null
        not_recorded[]  lines: what no figure here includes
        waits[]   null if not seen; what unit ms_per_step waits longest_ms
                  settings[]
        remedies[] lines
        data      waits for data loaders, null if not seen: ms_per_step percent cores busy
                  (of a core, each worker) queued (of the time, without one) loaders[]{name workers batch prefetch
                  persistent pinned ms_per_step first_ms_per_step starting_ms_per_step
                  epochs} advice[]
        rates[]   null if not seen; verb count bytes busy_s bytes_per_s reached_bytes_per_s
                  bench_bytes_per_s share_of_bench why; times are null
                  where why says so: not measured on CUDA
        large_batch[]  of each measured noise scale: name noise_scale first
                  batch growth[]{times batch sgd_lr adam_lr steps samples}
        oom       the failed request, as recorded, and lines[]
      ranks       null for one rank: world missing[] clocks[] peak_bytes{}{}
                  work_ms{} step_ms{} wait_ms{} by rank; skew and stragglers null
                  if not seen; skew_every (1 of so many collectives was compared)
        scores{}  by rank, the farthest first: robust deviations from the median
      deviations{}{}  of each figure by rank: the same, negative below the median
        outliers[]  rank host score odd[]{score figure value_ms median_ms, or of a
                  tier's peak value_bytes median_bytes}
        others    count figures[]{count figure median_ms low_ms high_ms or ..._bytes}
        skew[]    what key rank late_ns times count total_ns
        stragglers[]  rank host work_ns median_ns
      against     with --against, what zprof diff PLAN RUN --json prints
      summary[]   what to read first: about figure what remedy act (whether to act)
      next[]      do why
    """
    from zprof.show.report.findings import MOST
    from zprof.show.report.findings import report as found_out

    _keep_freed_memory()
    on = None if hardware is None else _hardware(hardware)
    if against is not None:
        _check_plan(against, runs)
    report = found_out(runs, by=by, step=at, most=max(top or 0, MOST), hardware=on)  # type: ignore[arg-type]
    if against is not None:
        from zprof.commands import diff

        pairs, apart = diff.compared([against], runs)
    if as_json and against is not None:
        report["against"] = diff.as_json(pairs, apart, ())
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from zprof.show.report.text import show

        show(report, top=top)
    if against is not None and not as_json:
        click.echo("\npredicted and measured")
        diff.show(against, runs[0] if len(runs) == 1 else "run", pairs, apart)
    if report["unreadable"]:
        raise click.exceptions.Exit(Problem.exit_code)


def _hardware(value: str) -> Any:
    from offload.errors import HardwareError
    from offload.hardware import Hardware

    try:
        return Hardware.of(value)
    except HardwareError as error:
        raise click.ClickException(str(error)) from None


def _check_plan(plan: str, runs: tuple[str, ...]) -> None:
    """Which of both is predicted.

    Raises:
        Misuse: it is not the other one alone.
    """
    from zprof.analysis.measured import simulated

    if not simulated(plan):
        raise Misuse(f"--against {plan}: expected a trace of zprof simulate, found one of a run; compare runs with zprof diff")
    if any(simulated(run) for run in runs):
        raise Misuse(f"--against {plan}: expected the report of a run, found one of a simulation; compare them with zprof diff")


def _keep_freed_memory() -> None:
    """Let glibc keep what large arrays give back: taking it anew from the system each time is a tenth of a large report."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Another C library: slower, and no less right.
        return
    # The first may be no larger.
    mallopt(_MMAP_THRESHOLD, 1 << 25)
    mallopt(_TRIM_THRESHOLD, 1 << 30)
