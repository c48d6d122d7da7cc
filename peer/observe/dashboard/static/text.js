// Numbers, times and elements.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const int = (x) => (x == null ? "–" : whole.format(x));
export const counted = (n, noun) => `${int(n)} ${noun}${n === 1 ? "" : "s"}`;
export const nats = (x) => (x == null ? "–" : x.toFixed(3));

export function rate(x) {
  if (x == null) return "–";
  return x >= 100 ? whole.format(x) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
}

export function size(bytes) {
  if (bytes == null) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 1000) return unit === "B" ? `${Math.round(bytes)} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} PB`;
}

export function since(seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

export function clock(unixS, withDate = false) {
  if (!unixS) return "–";
  const date = new Date(unixS * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return withDate ? `${date.toLocaleDateString("en-CA")} ${time}` : time;
}

export const shortId = (id) => id.slice(-8);
