/**
 * safetensors: 8 bytes of length, a JSON header, the tensors.
 *
 * Tensors stand without gaps, the widest elements first and the header padded to a multiple of 8
 * bytes, so that each starts at a multiple of its element's size.
 */
import { ArtifactError, listing } from "./errors.js";

/** A dtype as safetensors spells it. */
export type Dtype = keyof typeof WIDTHS;

/** A tensor's bytes, little endian, C order. */
export interface RawTensor {
  dtype: Dtype;
  shape: readonly number[];
  bytes: Uint8Array;
}

/** What a file holds. */
export interface SafeTensors {
  metadata: Record<string, string>;
  tensors: Map<string, RawTensor>;
}

/** Bytes of an element. */
export const WIDTHS = {
  BOOL: 1,
  U8: 1,
  I8: 1,
  U16: 2,
  I16: 2,
  F16: 2,
  BF16: 2,
  U32: 4,
  I32: 4,
  F32: 4,
  U64: 8,
  I64: 8,
  F64: 8,
} as const;

const PREFIX = 8;
const METADATA = "__metadata__";

/**
 * Reads a file.
 *
 * @param content - of the file.
 * @param name - what to call it in an error.
 * @returns metadata, and tensors whose bytes lie in `content`.
 * @throws ArtifactError: it is cut off or no safetensors file.
 */
export function readSafetensors(content: Uint8Array, name = "the file"): SafeTensors {
  // Not a Buffer of Node, whose slices share memory.
  const file = new Uint8Array(content.buffer, content.byteOffset, content.byteLength);
  const refuse = (because: string): never => {
    throw new ArtifactError(`cannot read ${name}`, {
      because,
      help: "it is cut off or no safetensors file: take a whole copy of it, or make it anew",
    });
  };
  if (file.length < PREFIX) refuse(`it has ${file.length} bytes, fewer than the header's length`);
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const length = view.getBigUint64(0, true);
  if (length > file.length - PREFIX) {
    refuse(`its header says to have ${length} bytes, and ${file.length - PREFIX} follow`);
  }
  const start = PREFIX + Number(length);
  const header =
    parseHeader(file.subarray(PREFIX, start)) ?? refuse("its header is no JSON object");
  const metadata: Record<string, string> = {};
  const tensors = new Map<string, RawTensor>();
  const ranges: [number, number][] = [];
  for (const [key, value] of Object.entries(header)) {
    if (key === METADATA) {
      if (!isStrings(value)) refuse(`${METADATA} is no object of strings`);
      Object.assign(metadata, value);
      continue;
    }
    const fault = faultOf(value);
    if (fault) refuse(`its header says of ${key} ${fault}`);
    const { dtype, shape, data_offsets } = value as Entry;
    ranges.push(data_offsets);
    const [begin, end] = data_offsets;
    tensors.set(key, { dtype, shape, bytes: file.subarray(start + begin, start + end) });
  }
  let end = 0;
  for (const [from, to] of ranges.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (from !== end) refuse("its tensors overlap or leave gaps");
    end = to;
  }
  const there = file.length - start;
  if (end !== there) refuse(`its tensors take ${end} bytes, and ${there} follow the header`);
  return { metadata, tensors };
}

/** Writes a file: its content. */
export function writeSafetensors({ metadata, tensors }: SafeTensors): Uint8Array {
  const header: Record<string, unknown> = { [METADATA]: metadata };
  const ordered = [...tensors].sort(([, a], [, b]) => WIDTHS[b.dtype] - WIDTHS[a.dtype]);
  let end = 0;
  for (const [name, { dtype, shape, bytes }] of ordered) {
    header[name] = { dtype, shape, data_offsets: [end, end + bytes.length] };
    end += bytes.length;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const start = PREFIX + Math.ceil(text.length / 8) * 8;
  const file = new Uint8Array(start + end);
  new DataView(file.buffer).setBigUint64(0, BigInt(start - PREFIX), true);
  file.fill(0x20, PREFIX, start).set(text, PREFIX);
  let at = start;
  for (const [, { bytes }] of ordered) {
    file.set(bytes, at);
    at += bytes.length;
  }
  return file;
}

interface Entry {
  dtype: Dtype;
  shape: number[];
  data_offsets: [number, number];
}

function parseHeader(bytes: Uint8Array): Record<string, unknown> | undefined {
  try {
    const header: unknown = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    return isObject(header) ? header : undefined;
  } catch {
    return undefined;
  }
}

/** What is wrong with a tensor's entry in the header. */
function faultOf(entry: unknown): string | undefined {
  if (!isObject(entry)) return "no object";
  const { dtype, shape, data_offsets: offsets } = entry;
  if (typeof dtype !== "string" || !Object.hasOwn(WIDTHS, dtype)) {
    return `the dtype ${String(dtype)}, not one of ${listing(Object.keys(WIDTHS), 20)}`;
  }
  if (!isSizes(shape)) return "a shape that is no list of sizes";
  if (!isSizes(offsets) || offsets.length !== 2) return "offsets that are no two positions";
  const [begin, end] = offsets as [number, number];
  const size = shape.reduce((product, n) => product * n, WIDTHS[dtype as Dtype]);
  return end - begin === size ? undefined : `${end - begin} bytes where its shape takes ${size}`;
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isStrings(value: unknown): value is Record<string, string> {
  return isObject(value) && Object.values(value).every((text) => typeof text === "string");
}

function isSizes(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((n) => Number.isSafeInteger(n) && n >= 0);
}
