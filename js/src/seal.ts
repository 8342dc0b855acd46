/**
 * Checksums that stand in the files which they are of, so that damage is found before it is read.
 *
 * A sealed file holds a mark and eight hexadecimal digits: the CRC-32 of the whole file, with zeros in
 * the digits' place.
 */

import { CHECKSUM, MODEL_HASH } from "./contract.js";
import { crc32 } from "./crc32.js";
import { ArtifactError, warn } from "./errors.js";
import { metadataOf } from "./onnx.js";

const MARK = "ortrain.crc32:";
// A model that was converted to ORT format keeps the metadata of the ONNX file, and with it a checksum
// of that file. Its own has another mark, of the same length.
const ORT_MARK = "ortrain.ort32:";
const ORT_FORMAT = "ORTM";
const ORT_FORMAT_AT = 4;
// In a model that another program has written, of parts that are ours.
const NONE = "none";
const DIGITS = 8;
const ZEROS = "0".repeat(DIGITS);

/** What a file holds until it is sealed. */
export const UNSEALED = MARK + ZEROS;

/** What to do with a file that is damaged. */
export const ANEW = "take a whole copy of it, or make it anew with generate_artifacts";

const encoder = new TextEncoder();
// One character for each byte, whatever it is.
const latin1 = new TextDecoder("latin1");

/** Where the digits of a file stand; undefined where it has none. */
export type Place = number | undefined;

/**
 * Where the digits of a model stand: after the first mark, of which all else follows.
 */
export function placeInModel(model: Uint8Array): Place {
  const start = latin1.decode(model.subarray(ORT_FORMAT_AT, ORT_FORMAT_AT + ORT_FORMAT.length));
  // The other mark also where it is the sign of the format that is damaged.
  return (
    (start === ORT_FORMAT ? undefined : placeAfter(model, MARK)) ?? placeAfter(model, ORT_MARK)
  );
}

function placeAfter(model: Uint8Array, mark: string): Place {
  const at = indexOf(model, mark);
  return at < 0 ? undefined : at + mark.length;
}

/**
 * Where the digits of a safetensors file stand: in the value of its metadata's `checksum`.
 *
 * A user's property may hold a mark, but no key: in a string of JSON each quote follows a backslash.
 *
 * @param length - of the file's part before the tensors, which may hold a mark by chance.
 */
export function placeInHeader(file: Uint8Array, length: number): Place {
  for (let at = length; ; ) {
    at = lastIndexOf(file, MARK, at);
    if (at < 0) return undefined;
    const before = latin1.decode(file.subarray(Math.max(0, at - KEY_REACH), at));
    if (/[^\\]"checksum"\s*:\s*"$/.test(before)) return at + MARK.length;
  }
}

// The key is written next to its value; other writers of JSON put a space or a line between.
const KEY_REACH = 64;

/** Why a file is not what was sealed; undefined where it is. */
export function damageOf(file: Uint8Array, place: number): string | undefined {
  const found = latin1.decode(file.subarray(place, place + DIGITS));
  const computed = digitsOf(file, place);
  if (found === computed) return undefined;
  const shown = /^[0-9a-f]*$/.test(found) ? found : JSON.stringify(found);
  return `its checksum is ${shown}, and its content has ${computed}`;
}

/** Seals a file where it lies. */
export function seal(file: Uint8Array, place: number): void {
  file.set(encoder.encode(digitsOf(file, place)), place);
}

/**
 * Verifies a model.
 *
 * @param name - what to call it in an error.
 * @returns whether it is sealed.
 * @throws ArtifactError: it is damaged.
 */
export function checkModelSeal(model: Uint8Array, name: string): boolean {
  const place = placeInModel(model);
  const because = place === undefined ? undefined : damageOf(model, place);
  if (because !== undefined) throw damagedError(name, because);
  return place !== undefined;
}

/** The error of a file that is not what was sealed. */
export function damagedError(name: string, because: string): ArtifactError {
  return new ArtifactError(`${name} is damaged`, { because, help: ANEW });
}

/** Says that a file cannot be verified. */
export function warnUnsealed(name: string, help: string): void {
  warn(`${name} has no checksum`, {
    because: "an earlier version wrote it, and damage to it would not be seen",
    help,
  });
}

/** Whether a model is one of ours that should have a checksum. It may be in ONNX or in ORT format. */
export function isSealable(model: Uint8Array): boolean {
  const isOurs = indexOf(model, MODEL_HASH) >= 0;
  return isOurs && metadataOf(model, CHECKSUM) !== NONE;
}

/** The checksum of a file with zeros as its digits. The file is not copied. */
function digitsOf(file: Uint8Array, place: number): string {
  const end = Math.min(place + DIGITS, file.length);
  const before = crc32(file.subarray(0, place));
  const zeros = crc32(encoder.encode(ZEROS.slice(0, end - place)), before);
  return crc32(file.subarray(end), zeros).toString(16).padStart(DIGITS, "0");
}

/** Where a text of ASCII stands first; -1 where it does not. */
function indexOf(bytes: Uint8Array, text: string): number {
  const wanted = encoder.encode(text);
  const first = wanted[0] as number;
  for (let at = bytes.indexOf(first); at >= 0; at = bytes.indexOf(first, at + 1)) {
    if (wanted.every((byte, i) => bytes[at + i] === byte)) return at;
  }
  return -1;
}

/** Where a text of ASCII stands last in the bytes before `end`; -1 where it does not. */
function lastIndexOf(bytes: Uint8Array, text: string, end: number): number {
  const wanted = encoder.encode(text);
  const first = wanted[0] as number;
  for (let at = end - wanted.length; at >= 0; at--) {
    at = bytes.lastIndexOf(first, at);
    if (at < 0 || wanted.every((byte, i) => bytes[at + i] === byte)) return at;
  }
  return -1;
}
