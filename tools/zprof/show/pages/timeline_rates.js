// Bytes a second, from the spans in view, and what NVML said of the device.
"use strict";

function rateOf(run, what, cells) {
  const begin = state.begin / TICK_MS, end = state.end / TICK_MS, cell = (end - begin) / cells;
  const sums = new Float64Array(cells);
  let any = false;
  for (const lane of run.lanes) {
    const number = lane.whats.indexOf(what);
    if (number < 0 || !lane.nbytes) continue;
    for (let i = 0; i < lane.begin.length; i++) {
      const from = lane.begin[i], length = Math.max(1, lane.length[i]);
      if (from > end) break;
      if (lane.what[i] !== number || !lane.nbytes[i]) continue;
      any = true;
      if (from + length < begin) continue;
      const first = Math.max(0, Math.floor((from - begin) / cell)), last = Math.min(cells - 1, Math.floor((from + length - begin) / cell));
      for (let j = first; j <= last; j++) {
        const part = Math.min(from + length, begin + (j + 1) * cell) - Math.max(from, begin + j * cell);
        if (part > 0) sums[j] += (lane.nbytes[i] * part) / length;
      }
    }
  }
  const seconds = (cell * TICK_MS) / 1000;
  return any ? sums.map((sum) => sum / seconds) : null;
}

let rates = [];

function makeRates() {
  const cells = Math.min(420, Math.floor(plotWidth() / 2.5));
  const step = (state.end - state.begin) / cells;
  rates = [];
  for (const [what, name, shade] of RATES) {
    const parts = shownRuns().map((run) => rateOf(run, what, cells)).filter(Boolean);
    if (!parts.length) continue;
    // Of several ranks the mean, so that the scale stays that of one link.
    const values = parts[0].map((_, i) => parts.reduce((sum, part) => sum + part[i], 0) / parts.length);
    rates.push({ name, shade, values, time: (tick) => Math.min(cells - 1, Math.max(0, Math.floor((tick * TICK_MS - state.begin) / step))) });
  }
  fillRateLegend();
  const measured = shownRuns().flatMap((run) => run.samples.filter((part) => part.unit === "B/s"));
  if (!rates.length && !measured.length) return null;
  let most = 1;
  const traces = rates.filter((rate) => !state.off.has(rate.name)).map((rate) => {
    const x = [], y = [];
    rate.values.forEach((value, i) => { x.push(state.begin + i * step, state.begin + (i + 1) * step); y.push(value, value); most = Math.max(most, value); });
    return { x, y, mode: "lines", line: { width: 1.4, color: color(rate.shade) }, fill: "tozeroy", fillcolor: `${color(rate.shade)}26`, hoverinfo: "skip" };
  });
  measured.forEach((part, i) => {
    const seen = visible(part.time, part.values);
    for (const index of seen) most = Math.max(most, part.values[index]);
    traces.push({ ...stairs(seen, part.time, (index) => part.values[index]), mode: "lines", line: { width: 1.2, dash: i % 2 ? "dash" : "dot", color: color("measured") }, hoverinfo: "skip" });
  });
  const layout = baseLayout(190, { l: LEFT, r: RIGHT, t: 10, b: 34 });
  layout.xaxis = timeAxis();
  layout.yaxis = { range: [0, most * 1.08], fixedrange: true, gridcolor: color("grid"), zeroline: false, tickmode: "array", ...STANDOFF, ...sizeTicks(most, "/s") };
  return { traces, layout };
}

function hoverRates(point) {
  const tick = point.ms / TICK_MS;
  const rows = rates.map((rate) => tipRow(rate.shade, rate.name, `${bytes(rate.values[rate.time(tick)])}/s`));
  for (const run of shownRuns()) {
    for (const part of run.samples) if (part.unit === "B/s") rows.push(tipRow(null, `${part.name} (NVML, ${part.key})`, `${bytes(at(part.time, part.values, tick))}/s`));
  }
  return rows.length ? [el("div", { class: "soft" }, `at ${stamp(point.ms)}`), el("table", {}, rows)] : null;
}

function deviceParts() {
  return shownRuns().flatMap((run) => run.samples.filter((part) => part.unit !== "B/s").map((part) => ({ ...part, run })));
}

function makeDevice() {
  const parts = deviceParts();
  if (!parts.length) return null;
  const layout = baseLayout(200, { l: LEFT, r: RIGHT, t: 10, b: 34 });
  let most = 1;
  const traces = parts.map((part, i) => {
    const watts = part.unit === "W";
    const seen = visible(part.time, part.values);
    if (watts) for (const value of part.values) most = Math.max(most, value);
    return { ...stairs(seen, part.time, (index) => part.values[index]), mode: "lines", yaxis: watts ? "y2" : "y", line: { width: 1.5, color: color(watts ? "gradient" : "parameter"), dash: DASHES[Math.floor(i / 2) % 4] }, hoverinfo: "skip" };
  });
  const both = parts.some((part) => part.unit === "W") && parts.some((part) => part.unit === "%");
  layout.xaxis = { ...timeAxis(), anchor: "y2" };
  layout.yaxis = { ...STANDOFF, domain: both ? [0.56, 1] : parts[0].unit === "%" ? [0, 1] : [0.99, 1], range: [0, 104], fixedrange: true, gridcolor: color("grid"), zeroline: false, tickmode: "array", tickvals: both || parts[0].unit === "%" ? [0, 50, 100] : [], ticktext: ["0 %", "50 %", "100 % busy"] };
  layout.yaxis2 = { ...STANDOFF, domain: both ? [0, 0.46] : parts[0].unit === "W" ? [0, 0.98] : [0, 0.01], range: [0, most * 1.1], fixedrange: true, gridcolor: color("grid"), zeroline: false, nticks: 4, ticksuffix: " W", showticklabels: parts.some((part) => part.unit === "W") };
  return { traces, layout };
}

function hoverDevice(point) {
  const tick = point.ms / TICK_MS;
  const rows = deviceParts().slice(0, 24).map((part) => tipRow(part.unit === "W" ? "gradient" : "parameter", `${part.name} ${part.key}${DATA.runs.length > 1 ? `, ${part.run.label}` : ""}`, `${digits(at(part.time, part.values, tick))} ${part.unit}`));
  return [el("div", { class: "soft" }, `at ${stamp(point.ms)}`), el("table", {}, rows)];
}
