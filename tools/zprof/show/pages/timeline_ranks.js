// All ranks of a run that has too many to draw: a strip and a curve of each figure, and a table, those that stand out first.
"use strict";

const RANKS = DATA.ranks;
const BLOCK = 74, STRIP = 13, MOST_COLUMNS = 1200, FEW_RANKS = 16, ODD = 3.5;
const ranking = { order: "rank", shown: FEW_RANKS, columns: [] };

if (RANKS) {
  for (const name of ["rank", "host", "farthest"]) RANKS[name] = column(RANKS[name]);
  for (const figure of RANKS.figures) {
    figure.values = column(figure.values);
    figure.apart = column(figure.apart);
    figure.write = figure.unit === "bytes" ? bytes : duration;
    figure.known = [...figure.values].filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
    figure.median = figure.known[figure.known.length >> 1];
  }
  for (const run of DATA.runs) run.why = RANKS.drawn[run.rank];
}

function seen(figure, at) {
  return Number.isNaN(figure.values[at]) ? "not seen" : figure.write(figure.values[at]);
}

// Places among the ranks, in the order that was chosen; what was not seen comes last.
function orderedRanks() {
  if (ranking.order === "rank") return [...RANKS.rank.keys()];
  if (ranking.order === "farthest") return [...RANKS.farthest];
  const { values } = RANKS.figures.find((figure) => figure.name === ranking.order);
  const weight = (at) => (Number.isNaN(values[at]) ? -Infinity : values[at]);
  return [...RANKS.rank.keys()].sort((a, b) => weight(b) - weight(a) || a - b);
}

// Neighbours share a column where there are more ranks than columns: of them the one that is farthest from the median.
function rankColumns() {
  const order = orderedRanks();
  const count = Math.min(order.length, MOST_COLUMNS);
  return Array.from({ length: count }, (_, i) => order.slice(Math.floor((i * order.length) / count), Math.floor(((i + 1) * order.length) / count)));
}

function farthestOf(figure, places) {
  const weight = (at) => (Number.isNaN(figure.apart[at]) ? -1 : Math.abs(figure.apart[at]));
  return places.reduce((best, at) => (weight(at) > weight(best) ? at : best));
}

function makeRanks() {
  ranking.columns = rankColumns();
  const { figures } = RANKS, height = figures.length * BLOCK, count = ranking.columns.length;
  const layout = baseLayout(height + 44, { l: LEFT, r: RIGHT, t: 4, b: 40 });
  const title = ranking.order === "rank" ? "rank" : ranking.order === "farthest" ? "ranks, the farthest from the median first" : `ranks, the highest first: ${ranking.order}`;
  layout.xaxis = { range: [-0.5, count - 0.5], domain: [0, 0.88], fixedrange: true, showgrid: false, zeroline: false, linecolor: color("line"), title: { text: title }, anchor: "free", position: 0, ...rankTicks() };
  layout.xaxis2 = { domain: [0.9, 1], fixedrange: true, showgrid: false, zeroline: false, showticklabels: false, title: { text: "ranks" }, anchor: "free", position: 0 };
  const traces = [];
  figures.forEach((figure, i) => {
    const dots = i ? `y${2 * i + 1}` : "y", strip = `y${2 * i + 2}`;
    const top = height - i * BLOCK, places = ranking.columns.map((each) => farthestOf(figure, each));
    const low = figure.known[0], high = figure.known[figure.known.length - 1], pad = (high - low || Math.abs(high) || 1) * 0.12;
    const axis = { fixedrange: true, zeroline: false, gridcolor: color("grid"), ...STANDOFF };
    const ticks = high > low * 1.02 ? [low, high] : [figure.median];
    layout[`yaxis${i ? 2 * i + 1 : ""}`] = { ...axis, domain: [(top - BLOCK + STRIP + 10) / height, (top - 6) / height], range: [low - pad, high + pad], tickmode: "array", tickvals: ticks, ticktext: ticks.map((value) => figure.write(value)) };
    layout[`yaxis${2 * i + 2}`] = { ...axis, domain: [(top - BLOCK + 6) / height, (top - BLOCK + 6 + STRIP) / height], range: [-0.5, 0.5], showgrid: false, tickmode: "array", tickvals: [0], ticktext: [`<b>${plain(figure.name)}</b>`] };
    const odd = places.map((at) => Math.abs(figure.apart[at]) > ODD && RANKS.odd[RANKS.rank[at]] !== undefined);
    traces.push({ type: "scatter", mode: "lines", x: [-0.5, count - 0.5], y: [figure.median, figure.median], yaxis: dots, line: { color: color("soft"), width: 1, dash: "dot" }, hoverinfo: "skip" });
    traces.push({ type: "scatter", mode: "markers", x: [...places.keys()], y: places.map((at) => (Number.isNaN(figure.values[at]) ? null : figure.values[at])), yaxis: dots, hoverinfo: "skip", cliponaxis: false,
      marker: { size: odd.map((each) => (each ? 7 : 3)), color: odd.map((each) => color(each ? "wait" : "parameter")), line: { width: 0 } } });
    traces.push({ type: "heatmap", z: [places.map((at) => (Number.isNaN(figure.apart[at]) ? null : Math.max(-2 * ODD, Math.min(2 * ODD, figure.apart[at]))))], x: [...places.keys()], y: [0], yaxis: strip,
      zmin: -2 * ODD, zmax: 2 * ODD, showscale: false, hoverinfo: "skip", colorscale: [[0, color("parameter")], [0.4, color("line")], [0.6, color("line")], [1, color("wait")]] });
    traces.push({ type: "histogram", y: figure.known, xaxis: "x2", yaxis: dots, nbinsy: 24, marker: { color: color("other") }, hoverinfo: "skip" });
  });
  return { traces, layout };
}

function rankTicks() {
  if (ranking.order !== "rank") return { showticklabels: false };
  const count = ranking.columns.length, every = Math.max(1, Math.ceil(count / 12));
  const shown = [...ranking.columns.keys()].filter((i) => i % every === 0);
  return { tickmode: "array", tickvals: shown, ticktext: shown.map((i) => RANKS.rank[ranking.columns[i][0]].toLocaleString("en")) };
}

// What is under the mouse: a figure, and of the column's ranks the farthest in it.
function rankAt(node, event) {
  const box = node.getBoundingClientRect();
  const part = (event.clientX - box.left - LEFT) / ((box.width - LEFT - RIGHT) * 0.88);
  const figure = RANKS.figures[Math.floor((event.clientY - box.top - 4) / BLOCK)];
  const column = Math.floor(part * ranking.columns.length);
  // Columns narrower than a hand can point at: those two pixels around count, too.
  const reach = Math.floor((2 * ranking.columns.length) / ((box.width - LEFT - RIGHT) * 0.88));
  const places = ranking.columns.slice(Math.max(0, column - reach), column + reach + 1).flat();
  return figure && places.length && part >= 0 && part < 1 ? { figure, places, at: farthestOf(figure, places) } : null;
}

function rankName(at) {
  return `rank ${RANKS.rank[at]} on ${RANKS.hosts[RANKS.host[at]]}`;
}

function rankTip({ figure, places, at }) {
  const rows = RANKS.figures.map((each) => tipRow(null, each.name, seen(each, at), each !== figure));
  const many = places.length > 1 ? el("div", { class: "soft" }, `the farthest of ${places.length} ranks here`) : null;
  return [el("b", {}, rankName(at)), many, el("table", {}, rows)].filter(Boolean);
}

function showRank(at) {
  const rank = RANKS.rank[at], index = DATA.runs.findIndex((run) => run.rank === rank);
  const rows = RANKS.figures.map((figure) => [figure.name, `${seen(figure, at)} (median ${figure.write(figure.median)})`, Math.abs(figure.apart[at]) > ODD && RANKS.odd[rank] ? "loud" : ""]);
  const show = () => {
    chooseRun(index);
    document.getElementById(`lanes-${index}`).scrollIntoView({ block: "nearest" });
  };
  openPanel(rankName(at), facts(rows), RANKS.odd[rank] && el("p", {}, `Stands out in ${RANKS.odd[rank]}.`),
    index >= 0 ? el("button", { id: "rank-lanes", type: "button", onclick: show }, "Show what ran")
      : el("p", { class: "soft" }, "What ran on it is not in this page: ", el("span", { class: "mono", id: "rank-command" }, `zprof timeline ${RANKS.files} --rank ${rank}`)));
}

function rankRow(at) {
  const rank = RANKS.rank[at];
  return el("tr", {}, el("td", { class: "num" }, el("button", { type: "button", "aria-label": `Figures of rank ${rank}`, onclick: () => showRank(at) }, String(rank))),
    el("td", { class: "mono" }, RANKS.hosts[RANKS.host[at]]),
    RANKS.figures.map((figure) => el("td", { class: "num" }, Number.isNaN(figure.values[at]) ? "" : figure.write(figure.values[at]))),
    el("td", {}, RANKS.odd[rank] || ""), el("td", { class: "soft" }, RANKS.drawn[rank] ? "yes" : ""));
}

function fillRanks() {
  const places = ranking.order === "rank" ? [...RANKS.farthest] : orderedRanks();
  document.getElementById("ranks-body").replaceChildren(...places.slice(0, ranking.shown).map(rankRow));
  const more = document.getElementById("ranks-more");
  more.hidden = ranking.shown >= places.length;
  more.textContent = `Show more of ${places.length.toLocaleString("en")}`;
}

function ranksSection() {
  const odd = Object.keys(RANKS.odd).length;
  const missing = RANKS.world > RANKS.count ? `; of ${RANKS.world.toLocaleString("en")} in the job` : "";
  const say = `${odd ? plural(odd, "rank") : "no rank"} stand${odd === 1 || !odd ? "s" : ""} out of ${RANKS.count.toLocaleString("en")}${missing}`;
  const orders = [["rank", "rank"], ["farthest", "farthest first"], ...RANKS.figures.map((figure) => [figure.name, figure.name])];
  const select = el("select", { id: "ranks-order", onchange: (event) => { ranking.order = event.target.value; drawRanks(); fillRanks(); } }, orders.map(([value, label]) => el("option", { value, selected: value === ranking.order }, label)));
  const made = section("ranks", "All ranks", el("span", { class: "say" }, say), el("label", { class: "soft" }, "Order ", select));
  if (RANKS.figures.length) {
    const node = el("div", { class: "plot", id: "ranks-plot", role: "group", "aria-label": "Figures of all ranks; the table below has them as text" });
    node.addEventListener("pointermove", (event) => {
      const found = rankAt(node, event);
      if (found) showTip(event.clientX, event.clientY, ...rankTip(found)); else hideTip();
    });
    node.addEventListener("pointerleave", hideTip);
    // Not "click", of which plotly sends one of its own behind the browser's.
    let pressed = null;
    node.addEventListener("pointerdown", (event) => { pressed = rankAt(node, event); hideTip(); }, true);
    window.addEventListener("pointerup", (event) => {
      const found = pressed && rankAt(node, event);
      if (found && found.at === pressed.at) showRank(found.at);
      pressed = null;
    }, true);
    made.append(node, el("p", { class: "note" }, `Dots are ranks, with a histogram of their values; the strip below is blue where a rank is below the median, red where it is above, full at ${2 * ODD} robust deviations. Hover names a rank, a click shows its figures.${RANKS.count > MOST_COLUMNS ? " Ranks that share a column are shown by the one farthest from the median." : ""}`));
  } else made.append(el("p", { class: "note" }, "Nothing was recorded by which ranks can be compared."));
  made.append(el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Ranks" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "num" }, "rank"), el("th", { scope: "col" }, "host"), RANKS.figures.map((figure) => el("th", { scope: "col", class: "num" }, figure.name)), el("th", { scope: "col" }, "stands out in"), el("th", { scope: "col" }, "drawn below"))),
    el("tbody", { id: "ranks-body" }))),
  el("p", { class: "note" }, el("button", { id: "ranks-more", type: "button", onclick: () => { ranking.shown += 100; fillRanks(); } })));
  return made;
}

function drawRanks() {
  const node = document.getElementById("ranks-plot");
  if (!node) return;
  const made = makeRanks();
  made.layout.width = document.querySelector("main").clientWidth - 2;
  Plotly.react(node, made.traces, made.layout, PLOT_CONFIG);
}
