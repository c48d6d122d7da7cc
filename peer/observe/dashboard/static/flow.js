// The picture of microbatches between stages. Rates and re-routes are measured; which replica a dot
// goes through is drawn by lot, weighted by what the replicas can do.

const SVG = "http://www.w3.org/2000/svg";
const MAX_NODES = 14; // of one stage; the others are told as a number
const MAX_DOTS = 60;
const HOP_MS = 420;
const HIT_MS = 1600;
const TALLEST = 280;

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

export class Flow {
  constructor(root, open) {
    this.root = root;
    this.wires = root.appendChild(svg("g", {}));
    this.moving = root.appendChild(svg("g", {}));
    this.nodes = root.appendChild(svg("g", {}));
    this.labels = root.appendChild(svg("g", {}));
    this.places = new Map();
    this.columns = [];
    this.height = TALLEST;
    this.drawn = "";
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.nodes.addEventListener("click", (e) => { if (e.target.dataset.peer) open(e.target.dataset.peer); });
  }

  show(numStages, peers) {
    const live = peers.filter((p) => p.live && p.stage >= 0 && p.stage < numStages);
    const width = Math.max(this.root.clientWidth, 40 * numStages);
    const key = JSON.stringify([numStages, width, live.map((p) => [p.peer_id, p.stage, p.state])]);
    this.speeds = new Map(live.map((p) => [p.peer_id, p.samples_per_s || 0.001]));
    if (key === this.drawn) return;
    this.drawn = key;
    this.places.clear();
    const columns = [...Array(numStages).keys()].map((k) => live.filter((p) => p.stage === k)
      .sort((a, b) => (a.peer_id < b.peer_id ? -1 : 1)));
    this.columns = columns.map((column) => column.slice(0, MAX_NODES).filter((p) => p.state === "active").map((p) => p.peer_id));
    const most = Math.max(1, ...columns.map((column) => Math.min(column.length, MAX_NODES)));
    const height = (this.height = Math.min(TALLEST, 60 + 36 * most));
    const nodes = [], labels = [], wires = [];
    columns.forEach((column, k) => {
      const x = ((k + 0.5) * width) / numStages;
      const shown = column.slice(0, MAX_NODES);
      const gap = Math.min(34, (height - 44) / Math.max(shown.length, 1));
      const radius = Math.max(4, Math.min(9, gap / 2 - 2));
      shown.forEach((peer, i) => {
        const y = (height - 20) / 2 + (i - (shown.length - 1) / 2) * gap;
        this.places.set(peer.peer_id, [x, y]);
        const state = String(peer.state).replace(/[^a-z]/g, "");
        const node = svg("circle", { cx: x, cy: y, r: radius, class: `node ${state}`, "data-peer": peer.peer_id });
        node.append(svg("title", {}, `${peer.peer_id} · ${peer.state}`));
        nodes.push(node);
      });
      const more = column.length - shown.length;
      labels.push(svg("text", { x, y: height - 6 }, numStages > 16 ? String(k) : `stage ${k}${more ? ` · +${more}` : ""}`));
    });
    for (let k = 0; k + 1 < numStages; k += 1) {
      for (const a of this.columns[k]) for (const b of this.columns[k + 1]) {
        if (wires.length >= 400) break;
        const [x1, y1] = this.places.get(a), [x2, y2] = this.places.get(b);
        wires.push(svg("line", { x1, y1, x2, y2, class: "wire" }));
      }
    }
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.style.height = `${height}px`;
    this.root.style.minWidth = `${40 * numStages}px`;
    this.nodes.replaceChildren(...nodes);
    this.labels.replaceChildren(...labels);
    this.wires.replaceChildren(...wires);
  }

  // So many more samples were committed.
  committed(samples, microbatch) {
    if (!(samples > 0) || this.calm.matches || document.hidden) return;
    const dots = Math.min(Math.ceil(samples / microbatch), 6);
    for (let i = 0; i < dots; i += 1) setTimeout(() => this.fly(), (i * 450) / dots);
  }

  pick(k) {
    const column = this.columns[k] ?? [];
    let left = Math.random() * column.reduce((sum, id) => sum + (this.speeds.get(id) ?? 0), 0);
    for (const id of column) {
      left -= this.speeds.get(id) ?? 0;
      if (left <= 0) return id;
    }
    return column[column.length - 1];
  }

  fly() {
    const path = this.columns.map((_, k) => this.pick(k)).filter(Boolean).map((id) => this.places.get(id)).filter(Boolean);
    if (!path.length || path.length !== this.columns.length || this.moving.childElementCount >= MAX_DOTS) return;
    const stops = [...path, ...path.toReversed().slice(1)];
    const dot = svg("circle", { r: 3.5, class: "dot" });
    this.moving.append(dot);
    const total = Math.max(1, stops.length - 1);
    const flight = dot.animate(stops.map(([x, y], i) => ({ transform: `translate(${x}px, ${y}px)`, offset: i / total })),
      { duration: HOP_MS * total, easing: "linear" });
    setTimeout(() => dot.classList.add("back"), (HOP_MS * total) / 2);
    flight.onfinish = flight.oncancel = () => dot.remove();
  }

  // A peer sent microbatches another way.
  rerouted(id) {
    const at = this.places.get(id);
    const node = [...this.nodes.children].find((n) => n.dataset.peer === id);
    if (!at || !node) return;
    node.classList.add("hit");
    setTimeout(() => node.classList.remove("hit"), HIT_MS);
    const k = this.columns.findIndex((column) => column.includes(id));
    const to = this.places.get(this.pick(k + 1)) ?? this.places.get(this.pick(k));
    if (!to || this.calm.matches) return;
    const [x1, y1] = at, [x2, y2] = to;
    const bend = y1 < this.height / 2 ? -46 : 46;
    const arc = svg("path", { d: `M${x1} ${y1} Q${(x1 + x2) / 2} ${(y1 + y2) / 2 + bend} ${x2} ${y2}`, class: "again" });
    this.moving.append(arc);
    arc.animate([{ opacity: 1 }, { opacity: 0 }], { duration: HIT_MS }).onfinish = () => arc.remove();
  }
}
