/** What browser tests call in a page. */
import {
  batches,
  compare,
  compareGradients,
  type Differences,
  type Entry,
  open,
  type Read,
  train,
} from "./scenario.js";

/** How far a hundred batches in this browser are from those of Python. */
export async function compareHere(entry: string, model: string): Promise<Differences> {
  return compare(await load(entry), from(model));
}

/** How far the loss and the gradients of one batch are. */
export async function compareGradientsHere(entry: string, model: string): Promise<number[]> {
  return compareGradients(await load(entry), from(model));
}

/** What lives on the device. */
export interface Device {
  /** Buffers that live after some batches, and after more. */
  buffers: [number, number];
  /** Bytes of the largest buffer that was read from the device meanwhile. */
  read: number;
}

/** Counts the buffers of WebGPU while training. */
export async function watchDevice(model: string): Promise<Device> {
  const { GPUDevice, GPUBuffer } = globalThis as unknown as Record<string, Watched>;
  let [live, read] = [0, 0];
  watch(GPUDevice, "createBuffer", () => {
    live++;
  });
  watch(GPUBuffer, "destroy", () => {
    live--;
  });
  watch(GPUBuffer, "mapAsync", ({ size }) => {
    read = Math.max(read, size);
  });
  const entry = await load("webgpu");
  const session = await open(entry, from(model));
  const feeds = await batches(entry, from(model));
  await train(session, feeds.slice(0, 20));
  const before = live;
  read = 0;
  await train(session, feeds.slice(20, 60));
  const result: Device = { buffers: [before, live], read };
  await session.release();
  return result;
}

interface Watched {
  prototype: Record<string, (...args: unknown[]) => unknown>;
}

/** Calls back at every call of a method, with what it is called of. */
function watch(
  kind: Watched | undefined,
  method: string,
  called: (buffer: { size: number }) => void,
): void {
  const original = kind?.prototype[method];
  if (!kind || !original) throw new Error(`the browser has no ${method}`);
  kind.prototype[method] = function (this: { size: number }, ...args: unknown[]) {
    called(this);
    return original.apply(this, args);
  };
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
