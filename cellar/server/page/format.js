// Figures as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(Math.round(number));

export const rate = (number) => (number >= 100 || number === 0 ? count(number) : number.toFixed(1));

/** A share; the smallest ones are not called nothing. */
export const percent = (share) => (share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`);

/** Three digits and a decimal unit. */
export function bytes(number) {
  let unit = 0;
  while (number >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit && number < 99.95 ? number.toFixed(number < 9.995 ? 2 : 1) : Math.round(number)} ${UNITS[unit]}`;
}

export function seconds(number) {
  return number < 0.0995 ? `${Math.round(1000 * number)} ms` : `${number.toFixed(number < 9.95 ? 1 : 0)} s`;
}
