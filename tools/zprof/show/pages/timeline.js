// The timeline: memory, lanes, rates and device samples over one time axis, all redrawn from columns for what is in view.
"use strict";

const LEFT = 118, RIGHT = 18, ROW = 17;
const TICK_MS = DATA.tick_ns / 1e6;
const END_MS = DATA.duration * TICK_MS;
const VIEW_NAMES = { process: "device + host", device: "device", host: "host", disk: "disk" };
const COLORS = {
  iteration: ["step", "step2"], forward: ["forward"], backward: ["backward"], compute: ["compute", "compute2", "compute3"],
  gather: ["gather"], reduce: ["reduce"], "copy h2d": ["h2d"], unstash: ["h2d2"], "copy d2h": ["d2h"], stash: ["d2h2"],
  "disk read": ["read"], "disk write": ["write"], update: ["update2"], step: ["update"], save: ["save"], load: ["save"],
  attachment: ["step2"],
};
const RATES = [
  ["gather", "gather", "gather"], ["reduce", "reduce", "reduce"], ["copy h2d", "host to device", "h2d"], ["copy d2h", "device to host", "d2h"],
  ["unstash", "activations in", "h2d2"], ["stash", "activations out", "d2h2"], ["disk read", "disk read", "read"], ["disk write", "disk write", "write"],
];
const FOCUS_MS = DATA.focus ? DATA.focus.begin * TICK_MS : 0;
const state = { begin: FOCUS_MS, end: END_MS, run: DATA.runs.length > 1 ? -1 : 0, view: null, query: "", off: new Set(), picked: null };
const plots = [];
// Space between the labels of an axis and what is drawn.
const STANDOFF = { ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)" };

for (const run of DATA.runs) {
  run.label = `rank ${run.rank}`;
  for (const lane of run.lanes) {
    for (const name of ["begin", "length", "key", "what", "row", "nbytes", "count", "busy"]) if (lane[name]) lane[name] = column(lane[name]);
  }
  for (const view of run.views) {
    view.time = column(view.time);
    for (const part of [...view.series, ...view.lines]) {
      part.values = column(part.values);
      if (part.time) part.time = column(part.time);
    }
    if (view.explained) view.explained = { time: column(view.explained.time), values: column(view.explained.values) };
    view.total = new Float64Array(view.time.length);
    for (const part of view.series) part.values.forEach((value, i) => { view.total[i] += value; });
  }
  for (const part of run.samples) { part.time = column(part.time); part.values = column(part.values); }
}
if (new Set(DATA.runs.map((run) => run.rank)).size < DATA.runs.length) for (const run of DATA.runs) run.label = `rank ${run.rank} of ${run.file}`;
const CROWDED = DATA.runs.length > 8;
if (CROWDED) state.run = DATA.runs.reduce((best, run, i) => (peakOf(run) > peakOf(DATA.runs[best]) ? i : best), 0);

function peakOf(run) {
  return run.views.length ? run.views[0].peak.total : 0;
}

function shownRuns() {
  return state.run < 0 ? DATA.runs : [DATA.runs[state.run]];
}

function spanName(what) {
  return { iteration: "step", step: "optimizer step", "copy h2d": "copy host to device", "copy d2h": "copy device to host" }[what] || what;
}

function spanColor(what, key) {
  const names = what.startsWith("wait") ? ["wait"] : COLORS[what] || ["other"];
  return names[key % names.length];
}

function after(times, tick) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= tick) low = middle + 1; else high = middle;
  }
  return low;
}

function at(times, values, tick) {
  const index = after(times, tick) - 1;
  return index < 0 ? 0 : values[index];
}

function plotWidth() {
  return Math.max(200, document.querySelector("main").clientWidth - 2 - LEFT - RIGHT);
}

function timeAxis(title) {
  return {
    range: [state.begin, state.end], showgrid: true, gridcolor: color("grid"), zeroline: false, linecolor: color("line"), tickcolor: color("line"),
    ticks: "outside", tickmode: "array", ...timeTicks(state.begin, state.end), title: title ? { text: title } : undefined,
  };
}

let queued = 0;

function zoom(begin, end) {
  const least = Math.max(TICK_MS * 4, 1e-5);
  const length = Math.min(END_MS, Math.max(least, end - begin));
  state.begin = Math.max(0, Math.min(begin, END_MS - length));
  state.end = state.begin + length;
  cancelAnimationFrame(queued);
  queued = requestAnimationFrame(drawAll);
}

function zoomBy(factor, center = (state.begin + state.end) / 2) {
  zoom(center - (center - state.begin) * factor, center + (state.end - center) * factor);
}

function move(part) {
  const length = state.end - state.begin;
  zoom(state.begin + length * part, state.end + length * part);
}

function drawAll() {
  for (const plot of plots) plot.draw();
  const whole = state.begin <= 0 && state.end >= END_MS;
  document.getElementById("range").textContent = whole ? `whole run, ${duration(END_MS)}` : `${duration(state.end - state.begin)} from ${moment(state.begin, (state.end - state.begin) / 1000)}`;
}

// One chart in a section; `make` says what to draw for the range in view, `point` what is under the mouse.
function addPlot(section, id, label, make, hover, click) {
  const node = el("div", { class: "plot", id, tabindex: "0", role: "group", "aria-label": `${label}. Arrow keys move, plus and minus zoom, 0 shows the whole run.` });
  section.append(node);
  const where = (event) => {
    const box = node.getBoundingClientRect();
    const x = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return { inside: x >= 0 && x <= 1, ms: state.begin + x * (state.end - state.begin), y: event.clientY - box.top };
  };
  let pressed = null;
  node.addEventListener("pointerdown", (event) => { pressed = [event.clientX, event.clientY]; hideTip(); }, true);
  // Listening on the window: while the mouse is down plotly covers the page.
  window.addEventListener("pointerup", (event) => {
    const here = pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) < 4;
    pressed = null;
    if (here && click) click(where(event));
  }, true);
  node.addEventListener("pointermove", (event) => {
    const point = where(event);
    moveCross(point.inside ? event.clientX : null);
    const content = point.inside && !pressed ? hover(point) : null;
    if (content) showTip(event.clientX, event.clientY, ...content); else hideTip();
  });
  node.addEventListener("pointerleave", () => { hideTip(); moveCross(null); });
  node.addEventListener("dblclick", () => zoom(0, END_MS));
  node.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const turned = event.deltaY || event.deltaX;
    zoomBy(turned > 0 ? 1.25 : 0.8, where(event).ms);
  }, { passive: false });
  node.addEventListener("keydown", (event) => {
    const action = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: () => zoom(0, END_MS) }[event.key];
    if (action) { action(); event.preventDefault(); }
  });
  let listening = false;
  const plot = {
    node, section,
    draw() {
      const made = make();
      section.hidden = !made;
      if (!made) return;
      made.layout.width = document.querySelector("main").clientWidth - 2;
      Plotly.react(node, made.traces, made.layout, PLOT_CONFIG);
      if (listening) return;
      listening = true;
      node.on("plotly_relayout", (changed) => {
        if (changed["xaxis.range[0]"] !== undefined) zoom(changed["xaxis.range[0]"], changed["xaxis.range[1]"]);
      });
    },
  };
  plots.push(plot);
  return plot;
}

const cross = el("div", { class: "cross" });

function moveCross(clientX) {
  cross.style.display = clientX === null ? "none" : "block";
  if (clientX === null) return;
  const box = document.querySelector("main").getBoundingClientRect();
  Object.assign(cross.style, { left: `${clientX + scrollX}px`, top: `${box.top + scrollY}px`, height: `${box.height}px` });
}
