// The page of a run. Messages come live (server-sent events) or from a film (replay); both go
// through `apply`, and what they changed is drawn at most once a frame.
// Text of peers is hostile: it gets onto the page by textContent only.

import { Charts, thin } from "./charts.js";
import { Flow } from "./flow.js";
import { $, clock, counted, el, int, nats, rate, since, size, shortId } from "./text.js";

const MAX_ROWS = 250;
const MAX_EVENTS = 500;
const MAX_EVENTS_SHOWN = 200;
const MAX_CURVE = 8000;
const LOST_AFTER_MS = 40_000;

const run = {
  about: {}, model: {}, peers: new Map(), given: new Map(), rounds: [], heldOut: [], events: [], mode: "live",
  now: () => (run.mode === "replay" ? run.time : Date.now() / 1000), time: 0,
};
const dirty = new Set();
const flow = new Flow($("flow"), openPeer);
const charts = new Charts();
let frameAsked = false;

// ---- what is known -----------------------------------------------------------------------------

function applyState(message) {
  Object.assign(run, { about: message.about, model: message.model ?? {}, rounds: message.rounds ?? [],
    heldOut: message.held_out ?? [], events: message.events ?? [], mode: message.mode });
  run.peers = new Map(Object.entries(message.peers ?? {}));
  run.given = new Map(Object.entries(message.given ?? {}));
  redraw("about", "model", "peers", "given", "curves", "events");
}

function applyTick(message, { quietly = false } = {}) {
  const before = run.model.committed ?? 0;
  const beforeRound = run.model.round ?? 0;
  if (message.model) {
    run.model = run.mode === "replay" ? { ...run.model, ...message.model } : message.model;
    redraw("model");
    if (!quietly) {
      const same = run.model.round === beforeRound;
      flow.committed(same ? run.model.committed - before : run.model.committed ?? 0, run.about.microbatch || 1);
    }
  }
  for (const [id, row] of Object.entries(message.peers ?? {})) {
    const old = run.peers.get(id);
    if (row === null) run.peers.delete(id);
    else {
      run.peers.set(id, row);
      if (!quietly && old && row.rerouted > old.rerouted) flow.rerouted(id);
    }
    if (run.mode === "replay" && row) remember(row);
  }
  if (message.peers) redraw("peers");
  for (const [machine, row] of Object.entries(message.given ?? {})) {
    if (row === null) run.given.delete(machine);
    else run.given.set(machine, row);
  }
  if (message.given) redraw("given");
  for (const [key, mine] of [["rounds", run.rounds], ["held_out", run.heldOut]]) {
    if (!message[key]) continue;
    mine.push(...message[key]);
    thin(mine, MAX_CURVE);
    redraw("curves");
  }
  if (message.events) {
    run.events.push(...message.events);
    if (run.events.length > MAX_EVENTS) run.events.splice(0, run.events.length - MAX_EVENTS);
    redraw("events");
  }
}

// ---- drawing -----------------------------------------------------------------------------------

function redraw(...parts) {
  parts.forEach((part) => dirty.add(part));
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(draw);
}

function draw() {
  frameAsked = false;
  performance.mark("draw-begin");
  const parts = new Set(dirty);
  dirty.clear();
  if (parts.has("about")) drawAbout();
  if (parts.has("model")) { drawNumbers(); drawStages(); }
  if (parts.has("peers")) { drawPeers(); flow.show(run.model.stages?.length ?? run.about.num_stages ?? 0, [...run.peers.values()]); }
  if (parts.has("given")) drawGiven();
  if (parts.has("curves")) charts.show(run.rounds, run.heldOut);
  if (parts.has("events")) drawEvents();
  performance.measure("draw", "draw-begin");
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function drawAbout() {
  setText($("name"), run.about.name || "swarmnet");
  setText($("description"), run.about.description || "");
  $("description").title = run.about.description || "";
  document.title = `${run.about.name || "swarmnet"} · swarmnet`;
  drawOffers(run.about.offers);
}

// ---- what may be taken away --------------------------------------------------------------------

let joinAsked = false;

function drawOffers(offers) {
  $("offers").hidden = !offers;
  if (!offers) return;
  $("offer-replay").hidden = !offers.replay;
  if (!offers.join || joinAsked) return;
  joinAsked = true;
  fetch("join.txt").then((answer) => (answer.ok ? answer.text() : ""), () => "").then((line) => {
    joinAsked = Boolean(line);
    $("offer-join").hidden = !line;
    setText($("join-line"), line);
  });
}

$("copy-join").addEventListener("click", () => {
  const chosen = getSelection();
  chosen.selectAllChildren($("join-line"));
  navigator.clipboard?.writeText($("join-line").textContent).catch(() => {});
});

function drawNumbers() {
  const m = run.model;
  const rounds = m.rounds ?? run.about.rounds ?? 0;
  const round = (m.round ?? 0) + 1;
  const isStopped = m.ends_with != null;
  setText($("n-round"), int(Math.min(round, rounds || Infinity, m.ends_with ?? Infinity)));
  const end = m.done ? (isStopped ? "ended by its owner" : "done") : isStopped ? `its owner ends it with round ${int(m.ends_with)}` : "";
  setText($("n-rounds"), [rounds ? `of ${int(rounds)}` : "", end].filter(Boolean).join(", "));
  setText($("n-loss"), nats(m.loss));
  setText($("n-held"), nats(m.held_out_loss));
  setText($("n-bits"), m.held_out_bits_per_byte ? `${m.held_out_bits_per_byte.toFixed(3)} bits per byte` : "");
  $("spread").hidden = !m.spread;
  setText($("n-spread"), m.spread ? `${(100 * m.spread).toFixed(2)} %` : "");
  setText($("n-speed"), rate(m.tokens_per_s));
  setText($("n-peers"), int(m.num_live));
  const gone = Math.max(0, run.peers.size - (m.num_live ?? 0));
  setText($("n-gone"), gone ? `${int(gone)} gone` : "all live");
  const batch = m.global_batch || 0;
  const part = (n) => `${batch ? Math.min(100, (100 * (n ?? 0)) / batch) : 0}%`;
  $("progress").hidden = !batch;
  $("progress").querySelector(".launched").style.width = part(m.launched);
  $("progress").querySelector(".committed").style.width = part(m.committed);
  setText($("progress-text"), `${int(m.committed)} of ${counted(batch, "sample")} committed, ${int(m.launched)} launched`);
  drawSplit(m.split);
}

function drawSplit(split) {
  $("split").hidden = !split;
  if (!split) return;
  const parts = [["compute", split.compute_s], ["exchange", split.exchange_s], ["waiting", split.waiting_s]];
  const whole = parts.reduce((sum, [, s]) => sum + s, 0) || 1;
  if (!$("split-bar").children.length) $("split-bar").append(...parts.map(([kind]) => el("i", { class: kind })));
  parts.forEach(([, s], i) => { $("split-bar").children[i].style.width = `${(100 * s) / whole}%`; });
  setText($("split-text"), "last round, mean over replicas: " +
    parts.map(([kind, s]) => `${kind} ${s.toFixed(2)} s (${Math.round((100 * s) / whole)} %)`).join(", "));
}

function drawStages() {
  const stages = run.model.stages ?? [];
  const most = Math.max(...stages.map((s) => s.samples_per_s), run.model.samples_per_s ?? 0, 1e-9);
  const box = $("stages");
  while (box.children.length > stages.length) box.lastChild.remove();
  while (box.children.length < stages.length) box.append(stageCard());
  stages.forEach((stage, i) => fillStage(box.children[i], stage, most));
  const risks = stages.filter((s) => s.risk);
  const shown = risks.slice(0, 6).map((s) => el("li", { class: s.num_replicas ? "" : "bad" }, s.risk));
  if (risks.length > 6) shown.push(el("li", {}, `and ${risks.length - 6} more`));
  if (!risks.length && stages.length) shown.push(el("li", { class: "fine" }, "every stage survives a failure"));
  if (run.model.data_risk) shown.unshift(el("li", {}, run.model.data_risk));
  replaceIfChanged($("risks"), shown);
}

function stageCard() {
  const card = el("div", { class: "stage" });
  card.append(el("div", { class: "title" }, el("b"), el("span", { class: "tag" })), el("div", { class: "dots" }),
    el("div", { class: "meter" }, el("i"), el("u")), el("small"));
  return card;
}

function fillStage(card, stage, most) {
  const [title, dots, meter, small] = card.children;
  card.className = `stage${stage.num_replicas ? "" : " empty"}${stage.is_bottleneck ? " bottleneck" : ""}`;
  setText(title.children[0], `stage ${stage.stage}`);
  setText(title.children[1], !stage.num_replicas ? "nobody" : stage.is_bottleneck ? "bottleneck" : "");
  const wanted = [...Array(Math.min(stage.num_replicas, 60)).fill(""), ...Array(Math.min(stage.num_joining, 20)).fill("joining")];
  while (dots.children.length > wanted.length) dots.lastChild.remove();
  while (dots.children.length < wanted.length) dots.append(el("i"));
  wanted.forEach((kind, i) => { if (dots.children[i].className !== kind) dots.children[i].className = kind; });
  const need = run.model.samples_per_s ?? 0;
  meter.children[0].style.width = `${(100 * stage.samples_per_s) / most}%`;
  meter.children[1].style.left = `${(100 * need) / most}%`;
  meter.children[1].hidden = !need;
  meter.title = need ? `can do ${rate(stage.samples_per_s)} samples/s; the run makes ${rate(need)}` : "";
  const replicas = counted(stage.num_replicas, "replica");
  const can = stage.samples_per_s ? `, ${rate(stage.samples_per_s)} samples/s${need ? ` of ${rate(need)} needed` : ""}` : "";
  const owners = stage.fewest_owners == null ? "" : `, shards on ≥ ${stage.fewest_owners}`;
  setText(small, replicas + can + owners);
}

function replaceIfChanged(box, nodes) {
  const same = box.children.length === nodes.length &&
    nodes.every((n, i) => n.textContent === box.children[i].textContent && n.className === box.children[i].className);
  if (!same) box.replaceChildren(...nodes);
}

// ---- peers -------------------------------------------------------------------------------------

const hasExperts = (p) => p.busiest_expert > 0;
// Heading, what sorts, what is shown, and of which peers one has to be there for the column to be.
const COLUMNS = [
  ["peer", (p) => p.peer_id, (p) => shortId(p.peer_id)],
  ["stage", (p) => p.stage, (p) => (p.stage >= 0 ? String(p.stage) : "–")],
  ["state", (p) => p.state, (p) => p.state],
  ["round", (p) => p.round, (p) => int(p.round)],
  ["samples/s", (p) => p.samples_per_s, (p) => (p.samples_per_s ? rate(p.samples_per_s) : "–")],
  ["busy", (p) => p.busy, (p) => (p.busy ? `${Math.round(100 * p.busy)} %` : "–")],
  ["queue", (p) => p.queue_length, (p) => int(p.queue_length)],
  ["upload", (p) => p.upload_bytes_per_s, (p) => (p.upload_bytes_per_s ? `${size(p.upload_bytes_per_s)}/s` : "–")],
  ["sent", (p) => p.sent_bytes, (p) => size(p.sent_bytes)],
  ["received", (p) => p.received_bytes, (p) => size(p.received_bytes)],
  ["direct", (p) => p.direct_links, (p) => `${p.direct_links}/${p.links}`],
  ["computed", (p) => p.samples_computed ?? 0, (p) => int(p.samples_computed ?? 0)],
  ["re-routes", (p) => p.rerouted, (p) => int(p.rerouted)],
  ["busiest expert", (p) => p.busiest_expert ?? 0, (p) => (hasExperts(p) ? `${p.busiest_expert.toFixed(1)} ×` : "–"), hasExperts],
  ["no room", (p) => p.expert_drops ?? 0, (p) => (hasExperts(p) ? `${(100 * p.expert_drops).toFixed(1)} %` : "–"), hasExperts],
  ["since", (p) => p.started_unix_s, (p) => since(run.now() - p.started_unix_s)],
  ["version", (p) => p.agent, (p) => p.agent || "–"],
];
const sorting = { column: 1, down: false };
const rows = new Map();

function drawHead() {
  const row = document.querySelector("#peers thead tr");
  COLUMNS.forEach(([name], i) => {
    const button = el("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      sorting.down = sorting.column === i ? !sorting.down : i > 2;
      sorting.column = i;
      markSorting();
      redraw("peers");
    });
    row.append(el("th", { scope: "col" }, button));
  });
  markSorting();
}

function markSorting() {
  document.querySelectorAll("#peers th").forEach((th, i) => {
    if (i === sorting.column) th.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  });
}

function matches(peer, words) {
  const text = `${peer.peer_id} ${peer.state} stage ${peer.stage} ${peer.agent}`.toLowerCase();
  const stage = /stage (\d+)/.exec(words);
  if (stage) return peer.stage === Number(stage[1]) && matches(peer, words.replace(stage[0], "").trim());
  return words.split(/\s+/).every((word) => text.includes(word));
}

function drawPeers() {
  const words = $("peer-filter").value.trim().toLowerCase();
  const key = COLUMNS[sorting.column][1];
  const sign = sorting.down ? -1 : 1;
  const found = [...run.peers.values()].filter((p) => !words || matches(p, words));
  found.sort((a, b) => {
    if (a.live !== b.live) return a.live ? -1 : 1;
    const x = key(a), y = key(b);
    return (x < y ? -sign : x > y ? sign : 0) || (a.peer_id < b.peer_id ? -1 : 1);
  });
  const body = document.querySelector("#peers tbody");
  const shown = found.slice(0, MAX_ROWS);
  const isLeftOut = COLUMNS.map(([, , , has]) => Boolean(has) && !found.some(has));
  document.querySelectorAll("#peers th").forEach((th, i) => { th.hidden = isLeftOut[i]; });
  const wanted = new Set(shown.map((p) => p.peer_id));
  for (const [id, row] of rows) if (!wanted.has(id)) { row.remove(); rows.delete(id); }
  let at = body.firstElementChild;
  for (const peer of shown) {
    let row = rows.get(peer.peer_id);
    if (!row) {
      row = el("tr", {}, ...COLUMNS.map(() => el("td")));
      row.tabIndex = 0;
      row.dataset.peer = peer.peer_id;
      rows.set(peer.peer_id, row);
    }
    if (row !== at) body.insertBefore(row, at);
    else at = at.nextElementSibling;
    row.className = peer.live ? "" : "gone";
    COLUMNS.forEach(([, , text], i) => {
      setText(row.children[i], text(peer));
      row.children[i].hidden = isLeftOut[i];
    });
    row.children[2].className = `s-${String(peer.state).replace(/[^a-z]/g, "")}`;
    row.children[0].title = peer.peer_id;
  }
  const hidden = found.length - shown.length;
  setText($("peers-more"), hidden ? `and ${int(hidden)} more; filter to find them` : "");
}

function drawGiven() {
  const found = [...run.given.values()].sort((a, b) => b.samples_computed - a.samples_computed || (a.machine < b.machine ? -1 : 1));
  $("given").hidden = !found.length;
  const shown = found.slice(0, MAX_ROWS).map((g) => {
    const row = el("tr", {}, el("td", {}, shortId(g.machine)), el("td", {}, int(g.samples_computed)), el("td", {}, size(g.sent_bytes)),
      el("td", {}, size(g.received_bytes)), el("td", {}, (g.serving_s / 3600).toFixed(1)));
    row.children[0].title = g.machine;
    return row;
  });
  document.querySelector("#given tbody").replaceChildren(...shown);
  const hidden = found.length - shown.length;
  setText($("given-more"), hidden ? `and ${int(hidden)} more` : "");
}

const kept = new Map(); // replay: history of each peer

function remember(row) {
  const points = kept.get(row.peer_id) ?? [];
  points.push([run.time, row.samples_per_s, row.queue_length, row.sent_bytes, row.received_bytes, row.round, row.live ? 1 : 0]);
  kept.set(row.peer_id, points);
}

async function openPeer(id) {
  const row = run.peers.get(id);
  if (!row) return;
  let history = { points: kept.get(id) ?? [], events: run.events.filter((e) => e.peer === id).slice(-20) };
  if (run.mode !== "replay") {
    try {
      const answer = await fetch(`peer?id=${encodeURIComponent(id)}`);
      if (answer.ok) history = await answer.json();
    } catch { /* shown without */ }
  }
  $("peer-name").textContent = id;
  $("peer-about").textContent = [
    row.state, row.stage >= 0 ? `stage ${row.stage}` : "no stage yet", `round ${row.round}`,
    row.has_data ? "feeds" : "does not feed", `since ${clock(row.started_unix_s, true)}`, row.agent,
  ].join(" · ");
  $("peer-events").replaceChildren(...history.events.toReversed().map(eventLine));
  if (!$("peer").open) $("peer").showModal();
  charts.showPeer(history.points);
}

// ---- events ------------------------------------------------------------------------------------

const GROUPS = {
  joins: ["peer_joined"], losses: ["peer_lost", "samples_lost", "slots_doubled"], moves: ["migrated"],
  promotions: ["shard_promoted"], resets: ["shard_reset"], "re-routes": ["rerouted", "retracted"],
};
const chosen = new Set();

function drawKinds() {
  for (const name of [...Object.keys(GROUPS), "others"]) {
    const button = el("button", { type: "button", "aria-pressed": "false" }, name);
    button.addEventListener("click", () => {
      if (!chosen.delete(name)) chosen.add(name);
      button.setAttribute("aria-pressed", String(chosen.has(name)));
      redraw("events");
    });
    $("kinds").append(button);
  }
}

const groupOf = (kind) => Object.keys(GROUPS).find((name) => GROUPS[name].includes(kind)) ?? "others";

function eventLine(event) {
  const kind = String(event.kind).replace(/[^a-z_]/g, "");
  return el("li", {}, el("i", { class: `k k-${kind}` }), el("time", {}, clock(event.t)), el("span", {}, event.text));
}

function drawEvents() {
  const words = $("event-filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const found = run.events.filter((e) => (!chosen.size || chosen.has(groupOf(e.kind))) &&
    words.every((word) => `${e.text} ${e.peer}`.toLowerCase().includes(word)));
  const shown = found.slice(-MAX_EVENTS_SHOWN).reverse();
  $("events").replaceChildren(...shown.map(eventLine));
  if (!shown.length) $("events").append(el("li", { class: "quiet" }, run.events.length ? "nothing of the kind" : "nothing yet"));
}

// ---- live --------------------------------------------------------------------------------------

function say(text, kind) {
  setText($("link"), text);
  $("link").className = `badge ${kind}`;
}

function goLive() {
  let heardAt = 0;
  let source;
  const connect = () => {
    source?.close();
    source = new EventSource("stream");
    heardAt = Date.now();
    source.addEventListener("state", (e) => { heardAt = Date.now(); say("live", "live"); applyState(JSON.parse(e.data)); });
    source.addEventListener("tick", (e) => { heardAt = Date.now(); say("live", "live"); applyTick(JSON.parse(e.data)); });
    source.onopen = () => { heardAt = Date.now(); };
    source.onerror = () => say("reconnecting", "lost"); // the browser tries again by itself
  };
  connect();
  setInterval(() => { // where the browser has given up, or the machine slept
    if (source.readyState === EventSource.CLOSED || (source.readyState === EventSource.CONNECTING && Date.now() - heardAt > LOST_AFTER_MS)) {
      say("reconnecting", "lost");
      connect();
    }
    redraw("peers"); // the column "since"
  }, 5000);
}

// ---- replay ------------------------------------------------------------------------------------

function goThrough(film) {
  const frames = film.frames;
  let at = -1;
  let playing = false;
  let last = 0;
  run.about = film.about;
  run.mode = "replay";
  say("replay", "live");
  $("player").hidden = false;
  $("seek").max = String(frames.length - 1);

  const reset = () => {
    Object.assign(run, { model: {}, rounds: [], heldOut: [], events: [], peers: new Map(), given: new Map() });
    kept.clear();
    at = -1;
  };
  const seek = (to) => {
    if (to < at) reset();
    const far = to - at > 3;
    while (at < to) {
      at += 1;
      run.time = frames[at].t;
      applyTick(frames[at], { quietly: far });
    }
    $("seek").value = String(at);
    setText($("when"), clock(run.time, true));
    redraw("about", "model", "peers", "curves", "events");
  };
  const step = (nowMs) => {
    if (!playing) return;
    const passed = Math.min(1, (nowMs - last) / 1000) * Number($("pace").value);
    last = nowMs;
    const until = (run.clock = (run.clock ?? frames[at].t) + passed);
    let to = at;
    while (to + 1 < frames.length && frames[to + 1].t <= until) to += 1;
    if (to > at) seek(to);
    if (at === frames.length - 1) pause();
    else requestAnimationFrame(step);
  };
  const pause = () => { playing = false; setText($("play"), "▶"); };
  const play = () => {
    if (at === frames.length - 1) seek(0);
    playing = true;
    last = performance.now();
    run.clock = frames[at].t;
    setText($("play"), "❚❚");
    requestAnimationFrame(step);
  };
  $("play").addEventListener("click", () => (playing ? pause() : play()));
  $("seek").addEventListener("input", () => { pause(); seek(Number($("seek").value)); });
  seek(frames.length - 1);
}

// ---- begin -------------------------------------------------------------------------------------

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage may be off */ }
  charts.restyle();
}

function fromTable(e) {
  const row = e.target.closest("tr[data-peer]");
  if (row && (e.type === "click" || e.key === "Enter")) openPeer(row.dataset.peer);
}

drawHead();
drawKinds();
$("theme").addEventListener("click", toggleTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.restyle());
document.querySelector("#peers tbody").addEventListener("click", fromTable);
document.querySelector("#peers tbody").addEventListener("keydown", fromTable);
$("peer-filter").addEventListener("input", () => redraw("peers"));
$("event-filter").addEventListener("input", () => redraw("events"));
addEventListener("resize", () => { charts.resize(); redraw("peers"); });

const film = await fetch("replay.json").catch(() => null);
if (film?.status === 200) goThrough(await film.json());
else goLive();
