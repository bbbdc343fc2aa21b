/** Formats numbers, sizes and times for display. */

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 12345 as "12,345"; nothing for what isn't a number. */
export function count(value) {
  return Number.isFinite(value) ? integer.format(value) : "–";
}

/** 1234567 as "1.2M", for summaries; the exact number is shown elsewhere. */
export function compact(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 10_000 ? integer.format(value) : short.format(value);
}

/** A rate: one decimal below 100. */
export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 100 ? oneDigit.format(value) : integer.format(value);
}

/** Milliseconds as "85 ms" or "1.2 s". */
export function duration(milliseconds) {
  if (!Number.isFinite(milliseconds)) return "–";
  if (milliseconds < 1000) return `${integer.format(milliseconds)} ms`;
  return `${oneDigit.format(milliseconds / 1000)} s`;
}

/** A fraction as "37 %". */
export function percent(fraction) {
  return Number.isFinite(fraction) ? `${integer.format(fraction * 100)} %` : "–";
}

/** "1 token", "2 tokens". */
export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

const UNITS = ["B", "KB", "MB", "GB", "TB"];

/** Bytes as "1.2 MB", with 1,024 bytes per kilobyte. */
export function size(bytes) {
  if (!Number.isFinite(bytes)) return "–";
  let unit = 0;
  let amount = bytes;
  while (amount >= 1024 && unit < UNITS.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${oneDigit.format(amount)} ${UNITS[unit]}`;
}

const clock = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric",
  month: "2-digit",
  day: "2-digit",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  timeZoneName: "short",
});

/** A date as "2026-11-29 14:41:22 CET", in the reader's time zone. */
export function moment(date) {
  return clock.format(date);
}
