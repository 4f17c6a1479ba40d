// Memory over time: the stacked categories, what was measured beside them, the remainder, and the peak.
"use strict";

const EXPLAINED = "python, libraries, malloc";

function viewOf(run) {
  return run.views.find((view) => view.name === state.view) || null;
}

// Points to draw in view: of each pixel's points the lowest, the highest and the last total, in their order.
function visible(times, total) {
  const first = Math.max(0, after(times, state.begin / TICK_MS) - 1);
  const last = Math.min(times.length, after(times, state.end / TICK_MS) + 1);
  const pixels = plotWidth() * 1.5;
  if (last - first <= pixels * 2) return Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
  const picked = new Set([first]);
  const perPixel = (state.end - state.begin) / TICK_MS / pixels;
  for (let i = first; i < last;) {
    const until = times[i] + perPixel;
    let low = i, high = i, j = i;
    for (; j < last && times[j] < until; j++) {
      if (total[j] < total[low]) low = j;
      if (total[j] > total[high]) high = j;
    }
    if (j === i) j++;
    picked.add(low).add(high).add(j - 1);
    i = j;
  }
  return [...picked].sort((a, b) => a - b);
}

function stairs(indices, times, value) {
  const x = [], y = [];
  indices.forEach((index, i) => {
    const ms = times[index] * TICK_MS, level = value(index);
    if (i) { x.push(ms); y.push(y[y.length - 1]); }
    x.push(ms); y.push(level);
  });
  if (indices.length) { x.push(Math.max(state.end, x[x.length - 1])); y.push(y[y.length - 1]); }
  return { x, y };
}

// What was measured beyond the ledger: the part the report has a line for, and the remainder; negative where it is less.
function beyond(view, measured) {
  return (tick, total) => {
    const gap = at(measured.time, measured.values, tick) - total;
    const explained = view.explained ? Math.max(0, Math.min(gap, at(view.explained.time, view.explained.values, Math.max(tick, view.explained.time[0])))) : 0;
    return { gap, explained, unexplained: Math.max(0, gap - explained) };
  };
}

function most(values) {
  return values.reduce((top, value) => Math.max(top, value), 0);
}

// Whether what was measured is so much more than the ledger holds that on one scale the model would be a strip: then the
// measured lines and the remainder have a band of their own below, with their own scale.
function apart(view) {
  const held = most(view.total);
  return held > 0 && view.lines.some((line) => most(line.values) > 1.5 * held);
}

function bandTraces(view) {
  const traces = [];
  const measured = view.remainder ? view.lines[0] : null;
  if (measured) {
    const parts = beyond(view, measured);
    const seen = visible(measured.time, measured.values);
    const of = (index) => parts(measured.time[index], at(view.time, view.total, measured.time[index]));
    const area = (name, value) => {
      if (!state.off.has(name)) traces.push({ ...stairs(seen, measured.time, value), mode: "lines", line: { width: 0 }, fill: traces.length ? "tonexty" : "tozeroy", fillcolor: color(name), hoverinfo: "skip", yaxis: "y2" });
    };
    if (view.explained) area("explained", (index) => of(index).explained);
    area("unexplained", (index) => of(index).unexplained + (view.explained && !state.off.has("explained") ? of(index).explained : 0));
  }
  return [...traces, ...lineTraces(view).map((trace) => ({ ...trace, yaxis: "y2" }))];
}

function lineTraces(view) {
  return view.lines.flatMap((line, i) => {
    if (state.off.has(line.name)) return [];
    const seen = visible(line.time, line.values);
    return [{ ...stairs(seen, line.time, (index) => line.values[index]), mode: "lines", line: { width: 1.5, color: color(i ? "soft" : "measured"), dash: i ? "dash" : "dot" }, hoverinfo: "skip" }];
  });
}

function areaTraces(view) {
  const indices = visible(view.time, view.total);
  const traces = [];
  let below = stairs(indices, view.time, () => 0);
  const sums = new Float64Array(view.time.length);
  const area = (top, fill) => {
    traces.push({ x: [...top.x, ...below.x.slice().reverse()], y: [...top.y, ...below.y.slice().reverse()], mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: fill, hoverinfo: "skip" });
    below = top;
  };
  for (const part of view.series) {
    if (state.off.has(part.name)) continue;
    for (const index of indices) sums[index] += part.values[index];
    area(stairs(indices, view.time, (index) => sums[index]), color(part.name));
  }
  if (apart(view)) return [...traces, ...bandTraces(view)];
  const measured = view.remainder ? view.lines[0] : null;
  if (measured) {
    const parts = beyond(view, measured);
    if (view.explained && !state.off.has("explained")) {
      for (const index of indices) sums[index] += parts(view.time[index], view.total[index]).explained;
      area(stairs(indices, view.time, (index) => sums[index]), color("explained"));
    }
    if (!state.off.has("unexplained")) {
      area(stairs(indices, view.time, (index) => sums[index] + parts(view.time[index], view.total[index]).unexplained), color("unexplained"));
    }
  }
  return [...traces, ...lineTraces(view)];
}

const RANK_COLORS = ["parameter", "gradient", "optimizer", "communication", "activation", "read", "h2d", "save"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

function makeMemory() {
  const runs = shownRuns().filter(viewOf);
  if (!runs.length) return null;
  const layout = baseLayout(300, { l: LEFT, r: RIGHT, t: 26, b: 34 });
  let traces;
  if (runs.length === 1) {
    traces = areaTraces(viewOf(runs[0]));
  } else {
    traces = runs.map((run, i) => {
      const view = viewOf(run);
      return { ...stairs(visible(view.time, view.total), view.time, (index) => view.total[index]), mode: "lines", line: { width: 1.6, color: color(RANK_COLORS[i % 8]), dash: DASHES[Math.floor(i / 8) % 4] }, hoverinfo: "skip" };
    });
  }
  const axis = (mine, domain) => {
    const top = Math.max(1, ...mine.map((trace) => most(trace.y)));
    return { domain, range: [0, top * 1.1], fixedrange: true, gridcolor: color("grid"), zeroline: false, tickmode: "array", ...STANDOFF, ...sizeTicks(top) };
  };
  const band = traces.filter((trace) => trace.yaxis === "y2");
  layout.xaxis = timeAxis();
  layout.yaxis = axis(traces.filter((trace) => !trace.yaxis), [band.length ? 0.36 : 0, 1]);
  if (band.length) {
    layout.height = 380;
    layout.xaxis.anchor = "y2";
    layout.yaxis2 = axis(band, [0, 0.28]);
  }
  const top = runs.reduce((best, run) => (viewOf(run).peak.total > viewOf(best).peak.total ? run : best));
  const peak = viewOf(top).peak, ms = peak.at * TICK_MS;
  if (peak.total && ms >= state.begin && ms <= state.end) {
    // The peak may be shorter than a pixel: it has a mark of its own.
    traces.push({ x: [ms], y: [peak.total], mode: "markers", marker: { size: 9, symbol: "diamond", color: color("ink"), line: { color: color("card"), width: 1.5 } }, hoverinfo: "skip" });
    const right = (ms - state.begin) / (state.end - state.begin) > 0.75;
    layout.shapes = [{ type: "line", x0: ms, x1: ms, yref: "paper", y0: 0, y1: 1, line: { color: color("ink"), width: 1.2 } }];
    layout.annotations = [{ x: ms, y: 1, yref: "paper", yanchor: "bottom", xanchor: right ? "right" : "left", showarrow: false, text: `<b>▼ peak ${peak.shown}</b>${runs.length > 1 ? ` ${plain(top.label)}` : ""}` }];
  }
  return { traces, layout };
}

function tipRow(name, label, value, soft) {
  return el("tr", { class: soft ? "soft" : "" }, el("td", {}, name ? dot(name) : "", label), el("td", { class: "num" }, value));
}

function hoverMemory(point) {
  const runs = shownRuns().filter(viewOf);
  if (!runs.length) return null;
  const tick = point.ms / TICK_MS;
  const rows = [];
  if (runs.length > 1) {
    runs.slice(0, 16).forEach((run, i) => rows.push(tipRow(RANK_COLORS[i % 8], run.label, bytes(at(viewOf(run).time, viewOf(run).total, tick)))));
    return [el("div", { class: "soft" }, `at ${stamp(point.ms)}`), el("table", {}, rows)];
  }
  const view = viewOf(runs[0]);
  const near = view.peak.total > 0 && Math.abs(view.peak.at * TICK_MS - point.ms) < (8 / plotWidth()) * (state.end - state.begin);
  if (near) return [el("b", {}, `peak ${view.peak.shown} at ${stamp(view.peak.at * TICK_MS)}, held by`), holderTable(view.peak)];
  const total = at(view.time, view.total, tick);
  for (const part of [...view.series].reverse()) rows.push(tipRow(part.name, part.name, bytes(at(view.time, part.values, tick))));
  rows.push(tipRow(null, "all of these", bytes(total)));
  view.lines.forEach((line, i) => {
    const value = at(line.time, line.values, tick);
    rows.push(tipRow(null, line.name, bytes(value)));
    if (!view.remainder || i) return;
    const { gap, explained, unexplained } = beyond(view, line)(tick, total);
    if (explained) rows.unshift(tipRow("explained", EXPLAINED, bytes(explained), true));
    rows.unshift(tipRow("unexplained", gap >= 0 ? "unexplained" : "in the ledger, not yet resident", bytes(gap >= 0 ? unexplained : -gap), true));
  });
  return [el("div", { class: "soft" }, `at ${stamp(point.ms)}`), el("table", {}, rows)];
}

function stamp(ms) {
  return moment(ms, 1e-3);
}

function showPeak(move = true) {
  const runs = shownRuns().filter(viewOf);
  if (!runs.length) return;
  const top = runs.reduce((best, run) => (viewOf(run).peak.total > viewOf(best).peak.total ? run : best));
  const view = viewOf(top), ms = view.peak.at * TICK_MS;
  const around = Math.min(END_MS, Math.max(2 * (DATA.report.step_ms || 0), END_MS / 200));
  if (move) zoom(ms - around / 2, ms + around / 2);
  openPanel(`Peak: ${view.peak.shown}`,
    facts([["rank", top.label], ["memory", VIEW_NAMES[view.name]], ["at", stamp(ms)], ["bytes", view.peak.total.toLocaleString("en")]]),
    el("h2", {}, "What held it"), holderTable(view.peak));
}
