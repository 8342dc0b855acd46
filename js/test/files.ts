import { readFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import * as web from "@ortrain/web";
import { type SafeTensors, writeSafetensors } from "@ortrain/web/core";
import * as node from "@ortrain/web/node";
import { placeInHeader, seal, UNSEALED } from "#inside/seal.js";
import type { Entry, Read } from "./scenario.js";

/** The folder of the package, above that of the compiled tests. */
export const ROOT = fileURLToPath(new URL("../../", import.meta.url));

/** What artifacts.py has made. */
export const ARTIFACTS = `${ROOT}build/artifacts`;

// Models this small are slower on several threads.
web.ort.env.wasm.numThreads = 1;

/** The runtimes that Node has. */
export const ENTRIES: Record<string, Entry> = { "onnxruntime-node": node as Entry, wasm: web };

/** Reads the files of one model. */
export function artifacts(model: string): Read {
  return (file) => readFile(`${ARTIFACTS}/${model}/${file}`);
}

/** A checkpoint with a checksum that fits, whatever else it holds. */
export function sealed({ metadata, tensors }: SafeTensors): Uint8Array {
  const file = writeSafetensors({ metadata: { ...metadata, checksum: UNSEALED }, tensors });
  seal(file, placeInHeader(file, file.length) as number);
  return file;
}
