// The page itself: the summary, legends, choices, the table of units, and the first drawing.
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
    ...(apart(view) ? [el("span", { class: "entry soft", id: "band" }, "lower band, with its own scale:")] : []),
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

// --- units ---------------------------------------------------------------------------------------------------------

const UNITS = DATA.units, FEW_UNITS = 50;

function unitColumns() {
  const waited = UNITS.name.map((_, row) => sum(UNITS.ms.map((each) => each[row])));
  const found = [{ id: "waited", label: "waited per step", values: waited, write: duration }];
  if (UNITS.kinds.length > 1) UNITS.kinds.forEach((kind, i) => found.push({ id: `for-${i}`, label: `for ${kind}`, values: UNITS.ms[i], write: duration }));
  found.push({ id: "count", label: "waits", values: UNITS.count, write: (count) => count.toLocaleString("en") });
  found.push({ id: "longest", label: "longest", values: UNITS.longest_ms, write: duration });
  UNITS.tiers.forEach((tier, i) => found.push({ id: tier, label: `${tier}, at its peak`, values: UNITS.held[i], write: bytes }));
  found.push({ id: "flops", label: "FLOPs per step", values: UNITS.flops, write: operations });
  return found.filter((each) => each.values.some((value) => value > 0)).map((each) => ({ ...each, most: most(each.values) }));
}

const COLUMNS = unitColumns();
const table = { sorted: COLUMNS.length ? COLUMNS[0].id : "name", down: true, whole: false };

function sortedUnits() {
  const by = COLUMNS.find((each) => each.id === table.sorted);
  const found = UNITS.name.map((_, row) => row).filter((row) => matches(UNITS.name[row]));
  const first = table.down ? -1 : 1;
  const byName = new Intl.Collator("en", { numeric: true });
  return found.sort((a, b) => first * (by ? by.values[a] - by.values[b] : byName.compare(UNITS.name[a], UNITS.name[b])) || a - b);
}

function sortUnits(id) {
  table.down = table.sorted === id ? !table.down : id !== "name";
  table.sorted = id;
  fillUnits();
}

function unitRow(row) {
  const show = () => {
    const run = UNITS.run[row], longest = UNITS.longest_ms[row];
    if (state.run >= 0 && state.run !== run) chooseRun(run);
    zoom(UNITS.at[row] * TICK_MS - longest * 2, UNITS.at[row] * TICK_MS + longest * 3);
    document.getElementById(`lanes-${run}`).scrollIntoView({ block: "nearest" });
  };
  const meter = (each) => each.id === table.sorted && el("i", { class: "meter", style: { width: `${(60 * each.values[row]) / each.most}px`, background: each.write === duration ? "var(--wait)" : "var(--parameter)" } });
  return el("tr", {}, el("td", { class: "name" }, UNITS.name[row] || "(no unit)"),
    COLUMNS.map((each) => el("td", { class: "num" }, each.values[row] ? each.write(each.values[row]) : "", meter(each))),
    UNITS.waited > 0 && el("td", { class: "mono" }, UNITS.settings[UNITS.remedy[row]]),
    UNITS.waited > 0 && el("td", {}, UNITS.longest_ms[row] > 0 && UNITS.count[row] > 0 && el("button", { type: "button", "aria-label": `Show the longest wait for ${UNITS.name[row]}`, onclick: show }, "Show")));
}

function fillUnits() {
  const body = document.getElementById("units-body");
  if (!body) return;
  for (const head of document.querySelectorAll("#units th[data-column]")) {
    if (head.dataset.column === table.sorted) head.setAttribute("aria-sort", table.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
  }
  const rows = sortedUnits();
  const drawn = table.whole ? rows : rows.slice(0, FEW_UNITS);
  body.replaceChildren(...drawn.map(unitRow));
  const more = document.getElementById("units-more");
  more.hidden = drawn.length === rows.length;
  more.textContent = `Show all ${rows.length.toLocaleString("en")}`;
}

function unitTable() {
  const all = UNITS.all > UNITS.name.length ? `the ${UNITS.name.length.toLocaleString("en")} largest of ${plural(UNITS.all, "unit")}` : plural(UNITS.all, "unit");
  const made = section("units", "Units and modules", el("span", { class: "say" }, `${RANKS ? `of the ${plural(DATA.runs.length, "rank")} drawn: ` : ""}${all}; a click on a heading sorts, Find filters`));
  if (UNITS.unseen) made.append(el("p", { class: "note" }, `Waits: ${UNITS.unseen}.`));
  if (!COLUMNS.length) {
    made.append(el("p", { class: "note" }, "No unit was recorded."));
    return made;
  }
  if (DATA.report.remedies.length) made.append(el("ul", { class: "note", id: "advice" }, DATA.report.remedies.map((line) => el("li", {}, line))));
  const heading = (id, label, number) => el("th", { scope: "col", class: number ? "num" : "", "data-column": id }, el("button", { type: "button", onclick: () => sortUnits(id) }, label));
  made.append(el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Units and modules" }, el("table", {},
    el("thead", {}, el("tr", {}, heading("name", "unit"), COLUMNS.map((each) => heading(each.id, each.label, true)),
      UNITS.waited > 0 && el("th", { scope: "col" }, "look at"), UNITS.waited > 0 && el("th", { scope: "col" }, el("span", { class: "sr" }, "show")))),
    el("tbody", { id: "units-body" }))),
  el("p", { class: "note" }, el("button", { id: "units-more", type: "button", onclick: () => { table.whole = true; fillUnits(); } })));
  return made;
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

// What `zprof report` says first, in its words; what is to be done stands out.
function summarySection() {
  const { summary, next, not_recorded: missing, doubts } = DATA.report;
  const made = section("summary", DATA.predicted ? `In short (predicted for ${DATA.predicted})` : "In short");
  made.append(el("table", { class: "findings" }, el("tbody", {}, summary.map((each) => el("tr", { class: each.act ? "act" : "" },
    el("th", { scope: "row" }, each.about), el("td", { class: "figure" }, each.figure),
    el("td", { class: "what" }, each.what, each.remedy && el("div", { class: "remedy" }, `remedy: ${each.remedy}`)))))));
  for (const line of doubts) made.append(el("p", { class: "warn" }, line));
  if (next.length) made.append(el("details", { id: "next" }, el("summary", {}, "What to run next"), el("ul", {}, next.map((each) => el("li", {}, el("span", { class: "mono" }, each.do), ` ${each.why}`)))));
  if (missing.length) made.append(el("details", { id: "missing" }, el("summary", {}, `What was not recorded (${missing.length})`), el("ul", {}, missing.map((line) => el("li", {}, line)))));
  return made;
}

function section(id, title, ...head) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("div", { class: "head" }, el("h2", { id: `${id}-title` }, title), head));
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
    DATA.runs.length > 1 && el("option", { value: "-1", selected: state.run < 0 }, RANKS ? `the ${DATA.runs.length} drawn` : `all ${DATA.runs.length} ranks`),
    DATA.runs.map((run, i) => el("option", { value: String(i), selected: state.run === i }, run.why ? `${run.label}: ${run.why}` : run.label)));
  rank.disabled = DATA.runs.length < 2;
  const tier = el("select", { id: "tier", onchange: (event) => { state.view = event.target.value; fillMemoryLegend(); drawAll(); } });
  const button = (id, label, title, action) => el("button", { id, type: "button", "aria-label": title, title, onclick: action }, label);
  return el("div", { class: "bar", role: "toolbar", "aria-label": "View" },
    el("label", {}, "Rank", rank), el("label", {}, "Memory", tier),
    el("label", {}, "Find", el("input", { id: "search", type: "search", placeholder: "unit name", oninput: (event) => search(event.target.value) })),
    el("span", { id: "found", class: "about", role: "status" }), el("span", { class: "gap" }), el("span", { id: "range", class: "about", role: "status" }),
    button("left", "◀", "Earlier", () => move(-0.4)), button("in", "+", "Zoom in", () => zoomBy(0.5)), button("out", "−", "Zoom out", () => zoomBy(2)),
    button("right", "▶", "Later", () => move(0.4)), button("whole", "Whole run", "Show the whole run", () => zoom(0, END_MS)),
    DATA.focus && button("focus", `From the ${DATA.focus.what}`, `Show the run from its ${DATA.focus.what} on`, () => zoom(FOCUS_MS, END_MS)),
    el("button", { id: "peak", class: "primary", type: "button", onclick: () => showPeak() }, "Go to peak"));
}

start(() => {
  const first = DATA.runs[0];
  const events = sum(DATA.runs.map((run) => run.events));
  const count = RANKS ? `${plural(RANKS.count, "rank")}, ${DATA.runs.length} drawn` : plural(DATA.runs.length, "rank");
  const about = [count, `${first.device} on ${first.host}`, `level ${first.level}`, plural(events, "event"), first.argv].filter(Boolean).join(" · ");
  const main = el("main", {});
  const page = document.getElementById("page");
  page.append(el("header", {}, el("h1", {}, DATA.title), el("div", { class: "about" }, about), themeButton()));
  page.append(el("div", { class: "first" }, summarySection()), toolbar());
  for (const note of DATA.notes) page.append(el("p", { class: "warn" }, note));
  if (DATA.focus) page.append(el("p", { class: "note", id: "before" }, `The recording began ${duration(DATA.focus.before_ns / 1e6)} before the ${DATA.focus.what}. "Whole run" shows that, too.`));
  page.append(el("div", { class: "split" }, main, panel), cross, tip);

  if (RANKS) main.append(ranksSection());
  const memory = section("memory", "Memory over time", el("div", { class: "legend", id: "memory-legend" }));
  main.append(memory);
  addPlot(memory, "memory-plot", "Memory over time", makeMemory, hoverMemory, (point) => {
    const runs = shownRuns().filter(viewOf);
    if (runs.length === 1 && Math.abs(viewOf(runs[0]).peak.at * TICK_MS - point.ms) < (8 / plotWidth()) * (state.end - state.begin)) showPeak(false);
  });
  DATA.runs.forEach((run, i) => {
    const say = DATA.runs.length > 1 ? [run.why, `${run.device} on ${run.host}`].filter(Boolean).join("; ") : "click a span for its details; drag to zoom, double-click for the whole run";
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
  if (RANKS) {
    fillRanks();
    for (const redraw of [themed, resized]) redraw.push(drawRanks);
    window.addEventListener("resize", drawRanks);
  }
  themed.push(drawAll);
  resized.push(drawAll);
  window.addEventListener("resize", () => zoom(state.begin, state.end));
  applyTheme();
  document.documentElement.dataset.ready = "yes";
});
