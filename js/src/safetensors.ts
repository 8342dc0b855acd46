/**
 * safetensors: 8 bytes of length, a JSON header, the tensors.
 *
 * Tensors stand without gaps, the widest elements first and the header padded to a multiple of 8
 * bytes, so that each starts at a multiple of its element's size.
 */
import { ArtifactError, InputError, listing } from "./errors.js";
import { parseJson } from "./json.js";

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
  const { metadata, entries, start, end } = parseFile(file, refuse);
  const there = file.length - start;
  if (end !== there) refuse(`its tensors take ${end} bytes, and ${there} follow the header`);
  const tensors = new Map<string, RawTensor>();
  for (const [key, { dtype, shape, data_offsets }] of entries) {
    const [from, to] = data_offsets;
    tensors.set(key, { dtype, shape, bytes: file.subarray(start + from, start + to) });
  }
  return { metadata, tensors };
}

/** Where the tensors start; undefined where a file ends before. */
export function startOf(file: Uint8Array): number | undefined {
  if (file.length < PREFIX) return undefined;
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const length = view.getBigUint64(0, true);
  return length > file.length - PREFIX ? undefined : PREFIX + Number(length);
}

/** Whether a file's header is whole, and says that the file ends elsewhere than it does. */
export function isCutOff(file: Uint8Array): boolean {
  try {
    const { start, end } = parseFile(file, (because) => {
      throw new ArtifactError(because);
    });
    return start + end !== file.length;
  } catch (error) {
    if (error instanceof ArtifactError) return false;
    throw error;
  }
}

interface Parsed {
  metadata: Record<string, string>;
  entries: [name: string, entry: Entry][];
  /** Where the tensors start. */
  start: number;
  /** Bytes of all tensors. */
  end: number;
}

/** What a file says before its tensors. */
function parseFile(file: Uint8Array, refuse: (because: string) => never): Parsed {
  const start = startOf(file) ?? refuse(lengthFault(file));
  const header = parseHeader(file.subarray(PREFIX, start), refuse);
  let metadata: Record<string, string> = {};
  const entries: [string, Entry][] = [];
  for (const [key, value] of Object.entries(header)) {
    if (key === METADATA) {
      metadata = isStrings(value) ? value : refuse(`${METADATA} is no object of strings`);
      continue;
    }
    const fault = faultOf(value);
    if (fault) refuse(`its header says of ${key} ${fault}`);
    entries.push([key, value as Entry]);
  }
  let end = 0;
  const ranges = entries.map(([, { data_offsets }]) => data_offsets);
  for (const [from, to] of ranges.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (from !== end) refuse("its tensors overlap or leave gaps");
    end = to;
  }
  return { metadata, entries, start, end };
}

function lengthFault(file: Uint8Array): string {
  if (file.length < PREFIX) return `it has ${file.length} bytes, fewer than the header's length`;
  const length = new DataView(file.buffer, file.byteOffset).getBigUint64(0, true);
  return `its header says to have ${length} bytes, and ${file.length - PREFIX} follow`;
}

/**
 * Writes a file: its content.
 *
 * @throws InputError: a tensor has a name that the format keeps for itself.
 */
export function writeSafetensors({ metadata, tensors }: SafeTensors): Uint8Array {
  if (tensors.has(METADATA)) {
    throw new InputError(`a tensor cannot have the name ${METADATA}`, {
      because: "it is that of the metadata in a safetensors file",
      help: "give it another name",
    });
  }
  // Not one assignment each: a tensor may have the name __proto__.
  const rows: [string, unknown][] = [[METADATA, metadata]];
  const ordered = [...tensors].sort(([, a], [, b]) => WIDTHS[b.dtype] - WIDTHS[a.dtype]);
  let end = 0;
  for (const [name, { dtype, shape, bytes }] of ordered) {
    rows.push([name, { dtype, shape, data_offsets: [end, end + bytes.length] }]);
    end += bytes.length;
  }
  const text = new TextEncoder().encode(JSON.stringify(Object.fromEntries(rows)));
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

function parseHeader(
  bytes: Uint8Array,
  refuse: (because: string) => never,
): Record<string, unknown> {
  let header: unknown;
  try {
    // A byte order mark is not of the format.
    const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
    header = parseJson(decoder.decode(bytes));
  } catch (error) {
    refuse(`its header is no JSON object: ${(error as Error).message}`);
  }
  return isObject(header) ? header : refuse("its header is no JSON object");
}

/** What is wrong with a tensor's entry in the header. */
function faultOf(entry: unknown): string | undefined {
  if (!isObject(entry)) return "no object";
  const { dtype, shape, data_offsets: offsets } = entry;
  if (typeof dtype !== "string" || !Object.hasOwn(WIDTHS, dtype)) {
    const given = typeof dtype === "string" ? `the dtype ${dtype}` : "a dtype that is no string";
    return `${given}, not one of ${listing(Object.keys(WIDTHS), 20)}`;
  }
  if (!isSizes(shape)) return "a shape that is no list of sizes";
  if (!isSizes(offsets) || offsets.length !== 2) return "offsets that are no two positions";
  const [begin, end] = offsets as [number, number];
  const size = bytesOfShape(dtype as Dtype, shape);
  if (size === undefined) return "a shape of more bytes than a file can have";
  return end - begin === size ? undefined : `${end - begin} bytes where its shape takes ${size}`;
}

/** Bytes of a tensor; undefined where a number cannot count them. */
export function bytesOfShape(dtype: Dtype, shape: readonly number[]): number | undefined {
  let bytes: number = WIDTHS[dtype];
  for (const size of shape) {
    bytes *= size;
    // A later size of 0 would make it fit again, and readers in other languages refuse it.
    if (!Number.isSafeInteger(bytes)) return undefined;
  }
  return bytes;
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
