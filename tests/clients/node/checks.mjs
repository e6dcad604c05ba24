// What the sessions share; python/checks.py is the same for Python.

export const URL = process.env.HONE_URL;
export const KEY = process.env.HONE_KEY;
export const MODEL = "default";
// Enough for every object and call, in the tokens of the embedded model.
export const OBJECT_TOKENS = 200;

const checks = [];

// Adds a function to the checks of the session.
export function check(name, run) {
  checks.push({ name, run });
}

export function expect(holds, otherwise) {
  if (!holds) throw new Error(otherwise);
}

// The error that an action raises, which must be of a class.
export async function raised(kind, action) {
  let result;
  try {
    result = await action();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new Error(`${JSON.stringify(result)} instead of ${kind.name}`);
}

// Runs the checks in the order of their definition, and prints a line of JSON for each.
export async function run() {
  for (const { name, run } of checks) {
    const began = performance.now();
    let error = null;
    try {
      await run();
    } catch (failure) {
      error = String(failure?.stack ?? failure).split("\n").slice(0, 3).join(" ");
    }
    const seconds = (performance.now() - began) / 1000;
    console.log(JSON.stringify({ check: name, seconds, error }));
  }
}
