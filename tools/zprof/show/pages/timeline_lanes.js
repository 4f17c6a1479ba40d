// What ran: the lanes of a rank, what is under the mouse, and the details of a span.
"use strict";

function matches(name) {
  return !state.query || name.toLowerCase().includes(state.query);
}

let matched = null;

function search(query) {
  state.query = query.trim().toLowerCase();
  matched = state.query ? DATA.names.map(matches) : null;
  const count = matched ? matched.filter(Boolean).length : 0;
  document.getElementById("found").textContent = matched ? `${plural(count, "name")} found` : "";
  fillUnits();
  drawAll();
}

// The spans in view: long ones alone, shorter ones of some pixels as one that knows how many it stands for and for how much
// of its time one was open. That share is drawn as its height, so that a lane half idle looks half idle.
function inView(lane) {
  const begin = state.begin / TICK_MS, end = state.end / TICK_MS;
  const pixel = (end - begin) / plotWidth();
  const open = new Map(), found = [];
  for (let i = 0; i < lane.begin.length; i++) {
    const from = lane.begin[i], length = lane.length[i];
    if (from > end) break;
    if (from + length < begin) continue;
    const count = lane.count ? lane.count[i] : 1;
    const busy = count > 1 ? lane.busy[i] : length;
    const nbytes = lane.nbytes ? lane.nbytes[i] : 0;
    const lit = !matched || matched[lane.key[i]];
    const short = length < pixel * 2;
    const cell = lane.row[i] * 1e7 + Math.floor(from / (pixel * 6));
    const slot = (cell * 256 + lane.what[i]) * 2 + (lit ? 1 : 0);
    const before = short && open.get(slot);
    if (before) {
      before.end = Math.max(before.end, from + length);
      before.count += count;
      before.busy += busy;
      before.nbytes += nbytes;
      if (length > before.longest) { before.longest = length; before.index = i; }
      continue;
    }
    const span = { begin: from, end: from + length, row: lane.row[i], what: lane.whats[lane.what[i]], index: i, count, busy, longest: length, nbytes, lit, cell };
    found.push(span);
    if (short) open.set(slot, span);
  }
  const filled = new Map();
  for (const span of found) {
    span.share = span.count > 1 ? Math.min(1, Math.max(0.12, span.busy / Math.max(span.end - span.begin, pixel))) : 1;
    // Those of several kinds in one place stand on one another.
    span.base = span.count > 1 ? filled.get(span.cell) || 0 : 0;
    if (span.base + span.share > 1) span.base = Math.max(0, 1 - span.share);
    if (span.count > 1) filled.set(span.cell, span.base + span.share);
  }
  return found;
}

function laneRows(run) {
  let y = 0;
  return run.lanes.map((lane) => {
    const top = y;
    y += lane.rows + 0.35;
    return { lane, top, middle: top + lane.rows / 2, bottom: top + lane.rows };
  });
}

function makeLanes(run) {
  if (!shownRuns().includes(run) || !run.lanes.length) return null;
  const rows = laneRows(run);
  const depth = rows[rows.length - 1].bottom + 0.2;
  const paths = new Map();
  const labels = [];
  const pixel = (state.end - state.begin) / plotWidth();
  run.drawn = rows.map((row) => ({ ...row, spans: inView(row.lane) }));
  for (const { lane, top, spans } of run.drawn) {
    // Where the last label of each row ends: in the last one spans may lie over one another.
    const ends = new Map();
    for (const span of spans) {
      const fill = `${spanColor(span.what, lane.key[span.index])}${span.lit ? "" : " dim"}`;
      if (!paths.has(fill)) paths.set(fill, { x: [], y: [] });
      const path = paths.get(fill);
      const x0 = Math.max(span.begin * TICK_MS, state.begin - pixel), full = Math.min(span.end * TICK_MS, state.end + pixel);
      // A pixel at least, and a hair of background between neighbours that are wide enough.
      const x1 = Math.max(full - (full - x0 > pixel * 4 ? pixel * 0.7 : 0), x0 + pixel);
      const y1 = top + span.row + 0.94 - 0.88 * span.base, y0 = y1 - 0.88 * span.share;
      path.x.push(x0, x1, x1, x0, x0, null);
      path.y.push(y0, y0, y1, y1, y0, null);
      const fits = Math.floor((full - x0) / pixel / 6.6) - 1;
      if (fits >= (span.what === "iteration" ? 2 : 4) && labels.length < 400 && span.count === 1 && span.lit && x0 >= (ends.get(span.row) || 0)) {
        const whole = DATA.names[lane.key[span.index]];
        const name = span.what === "iteration" && whole.length > fits ? whole.slice(5) : whole;
        ends.set(span.row, full);
        labels.push({ x: (x0 + full) / 2, y: top + span.row + 0.5, text: plain(name.length > fits ? `${name.slice(0, fits - 1)}…` : name) });
      }
    }
  }
  const traces = [...paths].map(([fill, path]) => {
    const dim = fill.endsWith(" dim");
    return { ...path, mode: "lines", line: { width: 0, simplify: false }, fill: "toself", fillcolor: color(dim ? fill.slice(0, -4) : fill), opacity: dim ? 0.18 : 1, hoverinfo: "skip" };
  });
  traces.push({ x: labels.map((label) => label.x), y: labels.map((label) => label.y), text: labels.map((label) => label.text), mode: "text", textfont: { size: 10.5, color: "#0b0e13" }, hoverinfo: "skip", cliponaxis: true });
  const layout = baseLayout((depth + 0.2) * ROW + 44, { l: LEFT, r: RIGHT, t: 8, b: 36 });
  layout.xaxis = timeAxis();
  layout.yaxis = { range: [depth, -0.2], fixedrange: true, showgrid: false, zeroline: false, ...STANDOFF, tickmode: "array", tickvals: rows.map((row) => row.middle), ticktext: rows.map((row) => (row.lane.name === "exposed waits" ? "<b>exposed waits</b>" : row.lane.name)) };
  const picked = state.picked && state.picked.run === run ? state.picked : null;
  layout.shapes = picked ? [{ type: "rect", x0: picked.x0, x1: Math.max(picked.x1, picked.x0 + pixel), y0: picked.y0, y1: picked.y1, line: { color: color("ink"), width: 2 } }] : [];
  run.depth = depth;
  return { traces, layout };
}

function spanAt(run, point) {
  if (!run.drawn) return null;
  const y = (point.y - 8) / ROW - 0.2;
  const tick = point.ms / TICK_MS, near = ((state.end - state.begin) / TICK_MS / plotWidth()) * 3;
  for (const row of run.drawn) {
    if (y < row.top || y > row.bottom) continue;
    let best = null, distance = near;
    for (const span of row.spans) {
      if (Math.floor(y - row.top) !== span.row) continue;
      const away = tick < span.begin ? span.begin - tick : tick > span.end ? tick - span.end : 0;
      if (away < distance || (away === 0 && best && span.count === 1 && span.begin >= best.begin)) { best = span; distance = away; }
    }
    if (best) return { ...best, lane: row.lane, top: row.top };
  }
  return null;
}

// For how long of a span its unit was waited for.
function exposedOf(run, span) {
  const lane = run.lanes.find((each) => each.name === "exposed waits");
  const waits = { gather: "wait gather", reduce: "wait reduce", "disk read": "wait fetch", "copy h2d": "wait fetch", stash: "wait stash", unstash: "wait unstash" }[span.what];
  if (!lane || !waits || span.count > 1) return null;
  let ticks = 0;
  for (let i = 0; i < lane.begin.length && lane.begin[i] < span.end; i++) {
    if (lane.whats[lane.what[i]] !== waits || lane.key[i] !== span.lane.key[span.index]) continue;
    ticks += Math.max(0, Math.min(span.end, lane.begin[i] + lane.length[i]) - Math.max(span.begin, lane.begin[i]));
  }
  return ticks * TICK_MS;
}

function hoverLanes(run, point) {
  const span = spanAt(run, point);
  if (!span) return null;
  const name = DATA.names[span.lane.key[span.index]];
  const rows = [];
  if (span.count > 1) {
    rows.push(tipRow(null, "open, summed", `${duration(span.busy * TICK_MS)} of ${duration((span.end - span.begin) * TICK_MS)}`), tipRow(null, "longest", name));
  } else rows.push(tipRow(null, "took", duration((span.end - span.begin) * TICK_MS)));
  if (span.nbytes) rows.push(tipRow(null, "bytes", bytes(span.nbytes)));
  const head = span.count > 1 ? `${span.count.toLocaleString("en")} × ${spanName(span.what)}` : `${spanName(span.what)} ${span.what === "iteration" ? name.slice(5) : name}`;
  return [el("b", {}, dot(spanColor(span.what, span.lane.key[span.index])), head), el("table", {}, rows)];
}

function pick(run, point) {
  const span = spanAt(run, point);
  if (!span) return;
  const name = DATA.names[span.lane.key[span.index]];
  const ms = (span.end - span.begin) * TICK_MS, busy = span.busy * TICK_MS;
  state.picked = { run, x0: span.begin * TICK_MS, x1: span.end * TICK_MS, y0: span.top + span.row + 0.03, y1: span.top + span.row + 0.97 };
  const waited = span.what.startsWith("wait"), exposed = exposedOf(run, span), many = span.count > 1;
  const rate = span.nbytes && busy ? `${bytes((span.nbytes / busy) * 1000)}/s` : null;
  const zoomTo = el("button", { type: "button", onclick: () => zoom(state.picked.x0 - ms * 0.3, state.picked.x1 + ms * 0.3) }, "Zoom to it");
  openPanel(many ? `${span.count.toLocaleString("en")} × ${spanName(span.what)}` : spanName(span.what),
    facts([
      [many ? "longest" : span.what === "iteration" ? "step" : "unit", el("span", { class: "mono" }, span.what === "iteration" ? name.slice(5) : name || "(no unit)")],
      ["rank", run.label],
      ["begins", stamp(span.begin * TICK_MS)],
      [many ? "from first to last" : "took", duration(ms)],
      many && ["open, summed", duration(busy)],
      span.nbytes > 0 && ["bytes", `${bytes(span.nbytes)} (${span.nbytes.toLocaleString("en")})`],
      rate && ["achieved", rate],
      waited && ["exposed", `${duration(busy)}, all of it`, "loud"],
      exposed !== null && ["exposed", exposed ? duration(exposed) : "none, hidden", exposed ? "loud" : ""],
    ]),
    many && el("p", { class: "soft" }, `Too short to distinguish here, so drawn as one, as high as the share of its time that one of them was open.${span.lane.count && span.lane.count[span.index] > 1 ? " The page keeps some of these merged at any zoom." : ""}`),
    zoomTo);
  drawAll();
}
