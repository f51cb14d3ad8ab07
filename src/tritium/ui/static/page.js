// The page over run directories. Text of runs is only ever set as text, never as markup.

const token = new URLSearchParams(location.search).get("token") ?? "";
const LIST_MS = 3000;
const LOG_CHARACTERS = 256 * 1024; // the most that is shown of a followed log
const CHART_HEIGHT = 220;
const COLORS = ["#2f81c7", "#d9822b", "#2a9d68", "#c2447a", "#7b61c9", "#8a8f2a", "#2aa5a5", "#a8583c"];
const at = (id) => document.getElementById(id);

function address(path, parameters = {}) {
  return `api/${path}?${new URLSearchParams({ token, ...parameters })}`;
}

async function ask(path, parameters) {
  const answer = await fetch(address(path, parameters));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function show(id, text) {
  at(id).textContent = text ?? "";
  at(id).hidden = !text;
}

const clock = (time) => (time ? new Date(time).toLocaleString() : "");
const LEVELS = { succeeded: "good", failed: "bad", gone: "bad", running: "", unknown: "warn" };

function number(value) {
  if (typeof value !== "number") return value ?? "";
  return Number.isInteger(value) ? value.toLocaleString() : String(parseFloat(value.toPrecision(4)));
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  const minutes = Math.floor(value / 60);
  return minutes ? `${minutes} min ${Math.round(value % 60)} s` : `${value.toFixed(1)} s`;
}

// A table keeps its rows: only what has changed is written, so that a selection and the focus stay.
function fill(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => {
    const row = body.rows[index] ?? body.insertRow();
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((cell, column) => {
      const place = row.cells[column] ?? row.insertCell();
      const [text, kind] = Array.isArray(cell) ? cell : [cell, typeof cell === "number" ? "number" : ""];
      const shown = String(number(text));
      if (place.textContent !== shown) place.textContent = shown;
      if (place.className !== (kind ?? "")) place.className = kind ?? "";
    });
  });
}

function columns(head, names) {
  const row = document.createElement("tr");
  for (const name of names) row.append(element("th", name));
  head.replaceChildren(row);
}

// ---- The list of runs

let listTimer = null;

async function list() {
  clearTimeout(listTimer);
  const rows = await ask("runs");
  if (location.hash.length > 1) return;
  at("none").hidden = rows.length > 0;
  const body = at("runs").tBodies[0];
  fill(body, rows.map((run) => [
    ["", ""], [run.status, LEVELS[run.status]], clock(run.started), seconds(run.seconds), run.ranks, run.failure ?? run.path]));
  rows.forEach((run, index) => {
    const link = element("a", run.run);
    link.href = `#${run.key}`;
    body.rows[index].cells[0].replaceChildren(link);
  });
  listTimer = setTimeout(() => list().catch(complain), LIST_MS);
}

// ---- One run

let source = null; // the server-sent events of the run that is shown
let key = "";
let parts = {};

function open() {
  source?.close();
  clearTimeout(listTimer);
  key = location.hash.slice(1);
  parts = {};
  at("list").hidden = Boolean(key);
  at("run").hidden = !key;
  show("connection", "");
  if (!key) {
    document.title = "Tritium: runs";
    list().catch(complain);
    return;
  }
  forget();
  source = new EventSource(address(`runs/${key}/events`));
  source.onmessage = (message) => {
    const changed = JSON.parse(message.data);
    for (const [name, part] of Object.entries(changed)) {
      if (part === null) delete parts[name];
      else parts[name] = part;
    }
    show("connection", "");
    render(changed);
  };
  source.onerror = () => show("connection", "not connected: the program that serves this page has ended, or is not reached");
}

function forget() {
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  at("charts").replaceChildren();
  at("events").replaceChildren();
  at("log-rank").replaceChildren();
  at("hits").hidden = true;
  Object.assign(log, { start: 0, end: 0, size: 0, rank: null });
  at("log-text").textContent = "";
  at("stacks").querySelector("pre").textContent = "";
}

function render(changed) {
  const names = Object.keys(changed);
  const any = (...starts) => names.some((name) => starts.some((start) => name.startsWith(start)));
  if (any("head")) renderHead(parts.head);
  if ("scored" in changed) renderScored(parts.scored);
  if ("model" in changed) renderModel(parts.model);
  if ("ranges" in changed) renderRanges(parts.ranges);
  if (any("ranks")) renderRanks(parts.ranks);
  if (any("events")) renderEvents(parts.events);
  if (any("data")) renderRows(parts.data);
  if (any("settings", "versions")) renderSettings();
  if (any("stacks")) at("stacks").hidden = !parts.stacks.length;
  if (any("metric ", "epochs ", "rate ", "scored ")) renderCharts();
  if (any("logs")) renderLogs(parts.logs);
}

function renderHead(head) {
  document.title = `${head.status}: ${head.run}`;
  at("run").className = head.failure ? "failed" : "";
  at("status").textContent = head.status;
  at("status").className = LEVELS[head.status] ?? "";
  at("name").textContent = head.run;
  show("headline", head.failure ?? head.stall ?? head.phase);
  show("next", head.next ? `Next: ${head.next}` : head.failure ? "" : head.retry);
  at("whole").hidden = !head.whole;
  at("whole").querySelector("pre").textContent = head.whole ?? "";
  at("fraction").hidden = head.fraction === null;
  if (head.fraction !== null) at("fraction").value = head.fraction;
  show("position", head.position);
  show("verdict", head.verdict && `Where the time went: ${head.verdict}`);
  const unread = head.unread ? ` · ${head.unread} events could not be read` : "";
  show("path", `${head.path} · started ${clock(head.started)}${head.seconds ? ` · took ${seconds(head.seconds)}` : ""}${unread}`);
}

const percent = (share) => (share === undefined || share === null ? "" : `${Math.round(share * 100)} %`);
const megabytes = (bytes) => (bytes ? `${Math.round(bytes / 1048576).toLocaleString()} MB` : "");
const STATES = { done: "good", running: "", starting: "", "ended with it": "warn", disconnected: "warn" };
const from1 = (index) => (index === undefined ? undefined : index + 1); // as in the display of a terminal
const RANK_COLUMNS = [
  ["rank", (rank) => rank.rank],
  ["state", (rank) => [rank.state, STATES[rank.state] ?? "bad"]],
  ["host", (rank) => rank.host],
  ["device", (rank) => rank.device],
  ["pid", (rank) => [rank.pid === undefined ? "" : String(rank.pid)]],
  ["now", (rank) => rank.phase],
  ["epoch", (rank) => from1(rank.epoch)],
  ["step", (rank) => from1(rank.step)],
  ["rows", (rank) => rank.rows],
  ["rows/s", (rank) => rank.rate],
  ["waits for data", (rank) => percent(rank.shares?.data)],
  ["computes", (rank) => percent(rank.shares?.compute)],
  ["exchanges", (rank) => percent(rank.shares?.exchange)],
  ["peak memory", (rank) => megabytes(rank.memory)],
  ["GPU", (rank) => percent(rank.gpu)],
  ["GPU memory", (rank) => megabytes(rank.gpu_memory)],
  ["last logged", (rank) => Object.entries(rank.values ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ")],
];

function renderRanks(ranks) {
  const cells = RANK_COLUMNS.map(([name, cell]) => [name, ranks.map(cell)]);
  const text = (cell) => (Array.isArray(cell) ? cell[0] : cell) ?? "";
  const used = cells.filter(([, values]) => values.some((cell) => text(cell) !== ""));
  columns(at("ranks").tHead, used.map(([name]) => name));
  fill(at("ranks").tBodies[0], ranks.map((_, index) => used.map(([, values]) => values[index])));
}

function renderScored(figures) {
  at("scored").hidden = !figures.length;
  at("all-ranks").hidden = Boolean(figures.length);
  const names = [...new Set(figures.flatMap(Object.keys))];
  columns(at("batches").tHead, names);
  fill(at("batches").tBodies[0], figures.map((figure) => names.map((name) => figure[name])));
}

function renderModel(values) {
  at("model").hidden = !values.length;
  columns(at("signature").tHead, ["", "name", "dtype", "shape of a row", "columns"]);
  const shape = (lengths) => `(${lengths.map((length) => length ?? "any").join(", ")})`;
  fill(at("signature").tBodies[0], values.map((value) => [value.kind, value.name, value.dtype, shape(value.shape), (value.columns ?? []).join(", ")]));
}

function renderRanges(ranges) {
  at("ranges").hidden = !Object.keys(ranges).length;
  columns(at("ranges").tHead, ["column", "nulls", "least", "largest"]);
  fill(at("ranges").tBodies[0], Object.entries(ranges).map(([name, facts]) => [name, percent(facts.nulls), ...(facts.range ?? ["", ""])]));
}

const SUMMED = ["rows", "skipped", "used", "padded", "dropped", "repeated"];

function total(names, ranks) {
  const sum = (name) => ranks.reduce((before, rank) => before + (rank[name] ?? 0), 0);
  return names.map((name) => (name === "rank" ? "all" : SUMMED.includes(name) ? sum(name) : ""));
}

function renderEvents(entries) {
  const list = at("events");
  const known = new Map([...list.children].map((item) => [item.dataset.number, item]));
  const items = entries.toReversed().map((entry) => known.get(String(entry.number)) ?? eventItem(entry));
  items.forEach((item, index) => {
    if (list.children[index] !== item) list.insertBefore(item, list.children[index] ?? null);
  });
  while (list.children.length > items.length) list.lastChild.remove();
}

function eventItem(entry) {
  const item = document.createElement("li");
  item.dataset.number = entry.number;
  item.dataset.kind = entry.kind;
  const time = element("time", new Date(entry.time).toLocaleTimeString());
  time.dateTime = entry.time;
  item.append(time, " ");
  if (entry.details) {
    const fold = document.createElement("details");
    fold.append(element("summary", entry.text, entry.level), element("pre", entry.details));
    item.append(fold);
  } else {
    item.append(element("span", entry.text, entry.level));
  }
  return item;
}

function renderRows(data) {
  at("data").hidden = !Object.keys(data).length;
  const tables = Object.entries(data).map(([name, ranks]) => {
    const box = element("div", "", "wide");
    box.tabIndex = 0;
    const table = document.createElement("table");
    const names = [...new Set(ranks.flatMap((rank) => Object.keys(rank)))];
    columns(table.createTHead(), names);
    table.prepend(element("caption", name));
    const rows = ranks.map((rank) => names.map((column) => rank[column]));
    fill(table.createTBody(), ranks.length > 1 ? [...rows, total(names, ranks)] : rows);
    box.append(table);
    return box;
  });
  at("shards").replaceChildren(...tables);
}

function renderSettings() {
  const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const rows = Object.entries(parts.settings).concat(Object.entries(parts.versions ?? {}));
  fill(at("settings").tBodies[0], rows.map(([name, value]) => [name, [written(value)]]));
}

at("stacks").addEventListener("toggle", async () => {
  if (!at("stacks").open) return;
  const texts = await ask(`runs/${key}/stacks`);
  at("stacks").querySelector("pre").textContent = Object.entries(texts).map(([name, text]) => `${name}\n\n${text}`).join("\n\n");
});

// ---- Charts

const charts = new Map(); // title → the chart
const plain = (name) => name.replace(/^(validation|val|train)[_/]/, "");

const overTime = (name) => /^(rate|scored) /.test(name);
// The title of the chart, and the label of the curve: "scored model ms: p50".
const timed = (name) => (name.startsWith("rate ") ? ["rows/s", name.replace("rate", "rank")] : name.slice(7).split(": "));

function renderCharts() {
  const start = `${at("x").value} `;
  const groups = new Map();
  for (const name of Object.keys(parts)) {
    const group = name.startsWith(start) ? plain(name.slice(start.length)) : overTime(name) ? timed(name)[0] : null;
    if (group === null) continue;
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  for (const id of ["x", "log"]) at(id).parentElement.hidden = !Object.keys(parts).some((name) => name.startsWith("metric "));
  at("numbers").hidden = !Object.keys(parts).some((name) => /^(metric|rate|scored) /.test(name));
  for (const title of [...charts.keys()]) if (!groups.has(title)) dropChart(title);
  for (const [title, names] of groups) draw(title, names);
}

function dropChart(title) {
  charts.get(title).destroy();
  charts.get(title).root.closest("figure")?.remove();
  charts.delete(title);
}

function draw(title, names) {
  const data = uPlot.join(names.map((name) => [parts[name].x, parts[name].y]));
  const known = charts.get(title);
  if (known && known.names.join() === names.join()) {
    const zoomed = known.zoomed;
    known.setData(data, !zoomed);
    if (zoomed) known.redraw();
    return;
  }
  if (known) dropChart(title);
  const figure = document.createElement("figure");
  figure.append(element("figcaption", title));
  const box = element("div");
  figure.append(box);
  at("charts").append(figure);
  const chart = new uPlot(options(title, names, box), data, box);
  Object.assign(chart, { names, zoomed: false });
  box.tabIndex = 0;
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${title}: ${names.map((name) => name.replace(/^\w+ /, "")).join(", ")}`);
  box.addEventListener("keydown", (event) => zoomByKey(chart, event));
  new ResizeObserver(() => box.clientWidth && chart.setSize({ width: box.clientWidth, height: CHART_HEIGHT })).observe(box);
  charts.set(title, chart);
}

function options(title, names, box) {
  const ink = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
  const axis = { stroke: ink("--faint"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 } };
  const times = overTime(names[0]);
  const series = names.map((name, index) => ({
    label: times ? timed(name).at(-1) : name.slice(name.indexOf(" ") + 1),
    stroke: COLORS[index % COLORS.length], width: 1.5, spanGaps: true,
    value: (_, value) => (value === null ? "" : number(value)),
  }));
  return {
    width: box.clientWidth || 400, height: CHART_HEIGHT, series: [{ label: times ? "time" : at("x").value === "metric" ? "step" : "epoch" }, ...series],
    // The library would round to three digits after the point: a learning rate of 0.0001 would be 0.
    axes: [axis, { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
    scales: { x: { time: times }, y: { distr: at("log").checked && !times ? 3 : 1 } },
    legend: { live: true }, cursor: { drag: { x: true, y: false } },
    hooks: {
      setSelect: [(chart) => { chart.zoomed = chart.select.width > 0; }],
      ready: [(chart) => chart.over.addEventListener("dblclick", () => { chart.zoomed = false; })],
    },
  };
}

function zoomByKey(chart, event) {
  const { min, max } = chart.scales.x;
  const middle = (min + max) / 2;
  const half = (max - min) / 2;
  const ranges = {
    "+": [middle - half / 2, middle + half / 2], "-": [middle - half * 2, middle + half * 2],
    ArrowLeft: [min - half / 2, max - half / 2], ArrowRight: [min + half / 2, max + half / 2],
    0: [chart.data[0][0], chart.data[0].at(-1)],
  };
  const range = ranges[event.key];
  if (!range) return;
  event.preventDefault();
  chart.zoomed = event.key !== "0";
  chart.setScale("x", { min: range[0], max: range[1] });
}

function drawAgain() {
  for (const title of [...charts.keys()]) dropChart(title);
  renderCharts();
}

at("x").addEventListener("change", drawAgain);
at("log").addEventListener("change", drawAgain);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);

// ---- Logs

const log = { start: 0, end: 0, size: 0, rank: null };
let reading = Promise.resolve(); // one request for the log at a time

// A terminal's colors are left out, and of a progress bar its last state is shown.
const clean = (text) => text.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "").replace(/[^\n]*\r(?=[^\n])/g, "");

function renderLogs(sizes) {
  const ranks = Object.keys(sizes);
  at("logs").hidden = !ranks.length;
  const select = at("log-rank");
  for (const rank of ranks.slice(select.options.length)) select.append(new Option(rank, rank));
  if (log.rank === null && ranks.length) {
    log.rank = ranks[0];
    read({});
  } else if (log.rank in sizes && sizes[log.rank] !== log.size) {
    log.size = sizes[log.rank];
    if (at("follow").checked) read({ after: log.end }, true);
    else showPlace();
  }
}

function read(where, append = false) {
  reading = reading.then(async () => {
    const run = key;
    const rank = log.rank;
    if (append) where = { after: log.end };
    const page = await ask(`runs/${run}/log`, { rank, ...where });
    if (run !== key || rank !== log.rank) return;
    const view = at("log-text");
    if (append && page.start === log.end) {
      if (!page.text) return;
      const whole = view.textContent + clean(page.text);
      view.textContent = whole.length > LOG_CHARACTERS ? whole.slice(whole.indexOf("\n", whole.length - LOG_CHARACTERS) + 1) : whole;
      Object.assign(log, { end: page.end, size: page.size });
    } else {
      view.textContent = clean(page.text);
      Object.assign(log, { start: page.start, end: page.end, size: page.size });
    }
    view.scrollTop = at("follow").checked || where.before !== undefined ? view.scrollHeight : 0;
    showPlace();
    if (append && log.end < log.size) read({}, true);
  }).catch(complain);
}

function showPlace() {
  const share = log.size ? Math.round((log.end / log.size) * 100) : 100;
  at("log-at").textContent = `up to ${share} % of ${log.size.toLocaleString()} bytes`;
  at("earlier").disabled = log.start === 0;
  at("later").disabled = log.end >= log.size;
}

function stopFollowing() {
  at("follow").checked = false;
}

at("log-rank").addEventListener("change", () => { log.rank = at("log-rank").value; read({}); });
at("follow").addEventListener("change", () => at("follow").checked && read({}));
at("earlier").addEventListener("click", () => { stopFollowing(); read({ before: log.start }); });
at("later").addEventListener("click", () => { stopFollowing(); read({ after: log.end }); });
at("end").addEventListener("click", () => read({}));
at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  find(0).catch(complain);
});

async function find(after) {
  const list = at("hits");
  const text = at("text").value;
  if (!after) list.replaceChildren();
  list.hidden = !text;
  if (!text) return;
  const answer = await ask(`runs/${key}/search`, { rank: log.rank, text, after });
  for (const hit of answer.hits) list.append(hitItem(hit.text, () => { stopFollowing(); read({ after: hit.at }); }));
  if (!list.children.length) list.append(element("li", "No line has this text."));
  if (answer.next === null) return;
  const more = hitItem("More …", () => { more.remove(); find(answer.next).catch(complain); });
  list.append(more);
}

function hitItem(text, go) {
  const item = document.createElement("li");
  const button = element("button", clean(text));
  button.type = "button";
  button.addEventListener("click", go);
  item.append(button);
  return item;
}

function complain(error) {
  show("connection", error.message);
}

addEventListener("hashchange", open);
addEventListener("load", open);
