/** What browser tests call in a page. */
import { compare, compareGradients, type Differences, type Entry, type Read } from "./scenario.js";

/** How far a hundred batches in this browser are from those of Python. */
export async function compareHere(entry: string, model: string): Promise<Differences> {
  return compare(await load(entry), from(model));
}

/** How far the loss and the gradients of one batch are. */
export async function compareGradientsHere(entry: string, model: string): Promise<number[]> {
  return compareGradients(await load(entry), from(model));
}

async function load(entry: string): Promise<Entry> {
  const loaded = (await import(`/dist/${entry}.js`)) as Entry;
  loaded.ort.env.wasm.numThreads = 1;
  return loaded;
}

function from(model: string): Read {
  return async (file) =>
    new Uint8Array(await (await fetch(`/build/artifacts/${model}/${file}`)).arrayBuffer());
}
