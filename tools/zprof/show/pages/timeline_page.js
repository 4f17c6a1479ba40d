// The page itself: legends, choices, cards, the table of units, and the first drawing.
"use strict";

function legendButton(name, label, shade, stroke) {
  const button = el("button", { type: "button", "aria-pressed": String(!state.off.has(name)), title: `Show or hide ${label}` },
    el("i", { class: stroke ? "stroke" : "", style: stroke ? { borderColor: `var(--${shade})`, borderTopStyle: stroke } : { background: `var(--${shade})` } }), label);
  button.addEventListener("click", () => {
    if (!state.off.delete(name)) state.off.add(name);
    button.setAttribute("aria-pressed", String(!state.off.has(name)));
    drawAll();
  });
  return button;
}

function fillMemoryLegend() {
  const legend = document.getElementById("memory-legend");
  const runs = shownRuns().filter(viewOf);
  if (runs.length > 1) {
    legend.replaceChildren(...runs.slice(0, 32).map((run, i) => el("span", { class: "entry" }, el("i", { class: "stroke", style: { borderColor: `var(--${RANK_COLORS[i % 8]})`, borderTopStyle: DASHES[Math.floor(i / 8) % 4] === "solid" ? "solid" : "dashed" } }), run.label)));
    return;
  }
  const view = runs.length ? viewOf(runs[0]) : null;
  legend.replaceChildren(...(view ? [
    ...view.series.map((part) => legendButton(part.name, part.name, part.name)),
    ...(apart(view) ? [el("span", { class: "entry soft", id: "band" }, "lower band, a scale of its own:")] : []),
    ...(view.explained ? [legendButton("explained", EXPLAINED, "explained")] : []),
    ...(view.remainder ? [legendButton("unexplained", "unexplained remainder", "unexplained")] : []),
    ...view.lines.map((line, i) => legendButton(line.name, line.name, i ? "soft" : "measured", i ? "dashed" : "dotted")),
  ] : []));
}

let rateNames = "";

function fillRateLegend() {
  const measured = shownRuns().flatMap((run) => run.samples.filter((part) => part.unit === "B/s"));
  const names = [...rates, ...measured].map((rate) => rate.name).join();
  if (names === rateNames) return;
  rateNames = names;
  document.getElementById("rates-legend").replaceChildren(...[...rates.map((rate) => legendButton(rate.name, rate.name, rate.shade)),
    ...measured.slice(0, 8).map((part, i) => el("span", { class: "entry" }, el("i", { class: "stroke", style: { borderColor: "var(--measured)", borderTopStyle: i % 2 ? "dashed" : "dotted" } }), `${part.name}, ${part.key} (NVML)`))]);
}

function fillViews() {
  const names = [...new Set(shownRuns().flatMap((run) => run.views.map((view) => view.name)))];
  if (!names.includes(state.view)) state.view = names[0] || null;
  const select = document.getElementById("tier");
  select.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === state.view }, VIEW_NAMES[name])));
  select.disabled = names.length < 2;
  fillMemoryLegend();
}

function fillUnits() {
  const body = document.getElementById("units-body");
  if (!body) return;
  const kinds = DATA.units.kinds, most = DATA.units.rows.length ? sum(DATA.units.rows[0].ms) : 1;
  body.replaceChildren(...DATA.units.rows.filter((row) => matches(row.unit)).map((row) => {
    const all = sum(row.ms);
    const show = () => {
      if (state.run >= 0 && state.run !== row.run) chooseRun(row.run);
      zoom(row.at * TICK_MS - row.longest_ms * 2, row.at * TICK_MS + row.longest_ms * 3);
      document.getElementById(`lanes-${row.run}`).scrollIntoView({ block: "nearest" });
    };
    return el("tr", {}, el("td", { class: "name" }, row.unit || "(no unit)"),
      el("td", { class: "num" }, duration(all), el("i", { class: "meter", style: { width: `${Math.max(2, (90 * all) / most)}px` } })),
      kinds.map((_, i) => el("td", { class: "num" }, row.ms[i] ? duration(row.ms[i]) : "")),
      el("td", { class: "num" }, row.count.toLocaleString("en")), el("td", { class: "num" }, duration(row.longest_ms)), el("td", { class: "mono" }, row.remedy),
      el("td", {}, el("button", { type: "button", "aria-label": `Show the longest wait for ${row.unit}`, onclick: show }, "Show")));
  }));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function chooseRun(index) {
  state.run = index;
  document.getElementById("rank").value = String(index);
  fillViews();
  drawAll();
}

function cards() {
  const found = [];
  const top = DATA.runs.reduce((best, run) => (peakOf(run) > peakOf(best) ? run : best));
  for (const view of top.views) {
    const [first] = view.peak.holders;
    found.push(card(`Peak${top.whole ? "" : " of what was recorded"}, ${VIEW_NAMES[view.name]}`, view.peak.total || top.whole ? view.peak.shown : "not seen", `${DATA.runs.length > 1 ? `${top.label}; ` : ""}${first ? `most: ${first[1]} ${first[3]}` : ""}`));
  }
  const steps = DATA.steps;
  found.push(card("Step, median", steps.median_ms === undefined ? "–" : duration(steps.median_ms), steps.median_ms === undefined ? (steps.count ? "no step was seen as a whole" : "no step recorded") : `of ${plural(steps.counted, "step")} after the first; 95th percentile ${duration(steps.p95_ms)}`));
  const perStep = DATA.units.ms_per_step;
  if (perStep === null) {
    found.push(card("Exposed waits", "not seen", DATA.units.unseen));
    return found;
  }
  const share = steps.median_ms ? ` ${((100 * perStep) / steps.median_ms).toFixed(1)} % of a step;` : "";
  found.push(card(steps.count ? "Exposed waits per step" : "Exposed waits", duration(perStep), `${share} ${plural(DATA.units.all, "unit")} waited for`, perStep > 0));
  return found;
}

function section(id, title, ...head) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("div", { class: "head" }, el("h2", { id: `${id}-title` }, title), head));
}

function unitTable() {
  const kinds = DATA.units.kinds;
  const made = section("units", "Units compute waited for", el("span", { class: "say" }, DATA.units.all > DATA.units.rows.length ? `the ${DATA.units.rows.length} worst of ${DATA.units.all.toLocaleString("en")}` : "worst first"));
  if (!DATA.units.rows.length) {
    made.append(el("p", { class: "note" }, DATA.units.unseen || "No wait was recorded: nothing stood still for a unit."));
    return made;
  }
  if (DATA.advice.length) made.append(el("ul", { class: "note", id: "advice" }, DATA.advice.map((line) => el("li", {}, line))));
  made.append(el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Units compute waited for" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "unit"), el("th", { scope: "col", class: "num" }, "exposed per step"), kinds.map((kind) => el("th", { scope: "col", class: "num" }, kind)), el("th", { scope: "col", class: "num" }, "waits"), el("th", { scope: "col", class: "num" }, "longest"), el("th", { scope: "col" }, "look at"), el("th", { scope: "col" }, el("span", { class: "sr" }, "show")))),
    el("tbody", { id: "units-body" }))));
  return made;
}

function mergedNote() {
  const { spans, kept, below_ns: below } = DATA.merged;
  if (!below) return `All ${spans.toLocaleString("en")} spans are in this page; what is too short to distinguish is drawn as one until you zoom in, as high as the share of time it takes.`;
  return `${spans.toLocaleString("en")} spans were recorded; this page keeps ${kept.toLocaleString("en")}: every one in the steps named above, elsewhere those of at least ${duration(below / 1e6)}. Shorter ones are merged with their neighbours, counted, and drawn as high as the share of time they take; zprof export has them all.`;
}

// Where this page has every span, of a run that has more than it could hold.
function wholeWindows() {
  if (!DATA.whole.length) return null;
  return el("div", { class: "legend", id: "whole-windows" }, el("span", { class: "entry soft" }, "every span kept:"),
    DATA.whole.map(({ name, begin, end }) => el("button", { type: "button", title: `Zoom to ${name}`, onclick: () => zoom((begin - (end - begin) * 0.05) * TICK_MS, (end + (end - begin) * 0.05) * TICK_MS) }, name)));
}

function toolbar() {
  const rank = el("select", { id: "rank", onchange: (event) => chooseRun(Number(event.target.value)) },
    DATA.runs.length > 1 && el("option", { value: "-1", selected: state.run < 0 }, `all ${DATA.runs.length} ranks`),
    DATA.runs.map((run, i) => el("option", { value: String(i), selected: state.run === i }, run.label)));
  rank.disabled = DATA.runs.length < 2;
  const tier = el("select", { id: "tier", onchange: (event) => { state.view = event.target.value; fillMemoryLegend(); drawAll(); } });
  const button = (id, label, title, action) => el("button", { id, type: "button", "aria-label": title, title, onclick: action }, label);
  return el("div", { class: "bar", role: "toolbar", "aria-label": "View" },
    el("label", {}, "Rank", rank), el("label", {}, "Memory", tier),
    el("label", {}, "Find", el("input", { id: "search", type: "search", placeholder: "unit name", oninput: (event) => search(event.target.value) })),
    el("span", { id: "found", class: "about", role: "status" }), el("span", { class: "gap" }), el("span", { id: "range", class: "about", role: "status" }),
    button("left", "◀", "Earlier", () => move(-0.4)), button("in", "+", "Zoom in", () => zoomBy(0.5)), button("out", "−", "Zoom out", () => zoomBy(2)),
    button("right", "▶", "Later", () => move(0.4)), button("whole", "Whole run", "Show the whole run", () => zoom(0, END_MS)),
    DATA.focus && button("focus", "Without the beginning", `Show the run from its ${DATA.focus.what} on`, () => zoom(FOCUS_MS, END_MS)),
    el("button", { id: "peak", class: "primary", type: "button", onclick: () => showPeak() }, "Go to peak"), themeButton());
}

start(() => {
  const first = DATA.runs[0];
  const events = sum(DATA.runs.map((run) => run.events));
  const about = [plural(DATA.runs.length, "rank"), `${first.device} on ${first.host}`, `level ${first.level}`, plural(events, "event"), first.argv].filter(Boolean).join(" · ");
  const main = el("main", {});
  const page = document.getElementById("page");
  page.append(el("header", {}, el("h1", {}, DATA.title), el("div", { class: "about" }, about)), toolbar());
  for (const run of DATA.runs) if (run.damage) page.append(el("p", { class: "warn" }, `${run.file}: ${run.damage}`));
  for (const note of DATA.notes) page.append(el("p", { class: "warn" }, note));
  if (DATA.focus) page.append(el("p", { class: "note", id: "before" }, `The recording began ${duration(DATA.focus.before_ns / 1e6)} before the ${DATA.focus.what}. "Whole run" shows that, too.`));
  page.append(el("div", { class: "cards" }, cards()), el("div", { class: "split" }, main, panel), cross, tip);

  const memory = section("memory", "Memory over time", el("div", { class: "legend", id: "memory-legend" }));
  main.append(memory);
  addPlot(memory, "memory-plot", "Memory over time", makeMemory, hoverMemory, (point) => {
    const runs = shownRuns().filter(viewOf);
    if (runs.length === 1 && Math.abs(viewOf(runs[0]).peak.at * TICK_MS - point.ms) < (8 / plotWidth()) * (state.end - state.begin)) showPeak(false);
  });
  DATA.runs.forEach((run, i) => {
    const say = DATA.runs.length > 1 ? `${run.device} on ${run.host}` : "click a span for its details; drag to zoom, double-click for the whole run";
    const lanes = section(`lanes-${i}`, DATA.runs.length > 1 ? `What ran, ${run.label}` : "What ran", el("span", { class: "say" }, say), i === 0 && wholeWindows());
    main.append(lanes);
    addPlot(lanes, `lanes-plot-${i}`, `What ran on ${run.label}`, () => makeLanes(run), (point) => hoverLanes(run, point), (point) => pick(run, point));
  });
  const moved = section("rates", "Bytes per second", el("span", { class: "say" }, DATA.runs.length > 1 ? "mean of the ranks shown" : ""), el("div", { class: "legend", id: "rates-legend" }));
  main.append(moved);
  addPlot(moved, "rates-plot", "Bytes per second", makeRates, hoverRates);
  const device = section("device", "Device, by NVML");
  main.append(device);
  addPlot(device, "device-plot", "Device utilisation and power", makeDevice, hoverDevice);
  main.append(unitTable(), el("p", { class: "note" }, mergedNote()));

  fillViews();
  fillUnits();
  themed.push(drawAll);
  resized.push(drawAll);
  window.addEventListener("resize", () => zoom(state.begin, state.end));
  applyTheme();
  document.documentElement.dataset.ready = "yes";
});
