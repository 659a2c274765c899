// Numbers as people read them. A missing number is a dash.

const DASH = "–";
const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (number) => (number == null ? DASH : whole.format(number));

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function milliseconds(ms) {
  if (ms == null) return DASH;
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(2)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

export function bytes(number) {
  if (number == null) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 || number >= 100 ? number.toFixed(0) : number.toFixed(1)} ${units[unit]}`;
}

export const percent = (share) => (share == null ? DASH : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);

export const rate = (number) => (number > 0 && number < 10 ? number.toFixed(1) : count(number == null ? null : Math.round(number)));

export const timeOfDay = (unixMs) => clock.format(new Date(unixMs));

export const shortId = (id) => (id.length > 8 ? id.slice(0, 8) : id);
