/**
 * The checkpoint: safetensors, with what training needs to know in its metadata.
 *
 * See docs/ondevice-contract.md for the keys.
 */
import { ArtifactError, listing } from "./errors.js";
import { parseJson } from "./json.js";
import { Properties } from "./properties.js";
import {
  bytesOfShape,
  type Dtype,
  isCutOff,
  type RawTensor,
  readSafetensors,
  startOf,
  WIDTHS,
  writeSafetensors,
} from "./safetensors.js";
import {
  ANEW,
  damagedError,
  damageOf,
  type Place,
  placeInHeader,
  seal,
  UNSEALED,
  warnUnsealed,
} from "./seal.js";
import { sha256 } from "./sha256.js";

/** Name, dtype and shape of a tensor. */
export interface Spec {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
}

/** A parameter, trained or frozen. */
export interface ParameterSpec extends Spec {
  readonly requires_grad: boolean;
}

/** What a checkpoint says of its tensors. */
export interface Description {
  readonly parameters: readonly ParameterSpec[];
  readonly buffers: readonly Spec[];
  /** Those of the optimizer; empty where there is none. */
  readonly states: readonly Spec[];
  /** The metadata that says so, kept as spelled: `model` is a hash of the strings. */
  readonly texts: Readonly<Record<TextKey, string>> & { readonly adapters?: string };
}

/** What a checkpoint holds. */
export interface Checkpoint {
  readonly description: Description;
  readonly tensors: Map<string, RawTensor>;
  readonly properties: Properties;
  /** Updates done. */
  readonly step: bigint | undefined;
  /** That of the next run in training mode. */
  readonly seed: bigint | undefined;
  readonly learningRate: number | undefined;
}

type TextKey = (typeof TEXTS)[number];

const FORMAT = "ortrain.checkpoint";
const VERSION = 2;
/** Of the files that have no checksum. */
const UNSEALED_VERSION = 1;
const TEXTS = ["parameters", "buffers", "states", "model"] as const;
const MOST_NAMED = 3;
const DECIMAL = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;

/**
 * Reads a checkpoint. One without a checksum, of version 1, is read with a warning.
 *
 * @param file - its content.
 * @param name - what to call it in an error.
 * @throws ArtifactError: it is damaged, cut off, no checkpoint, of a newer version, or its tensors
 *   are not those that it lists.
 */
export function readCheckpoint(file: Uint8Array, name: string): Checkpoint {
  const sealed = checkSeal(file, name);
  const { metadata, tensors } = readSafetensors(file, name);
  if (metadata.format !== FORMAT) {
    throw new ArtifactError(`${name} is no checkpoint of on-device training`, {
      because: `its metadata does not say that its format is ${FORMAT}`,
      help: "give the file `checkpoint` of generate_artifacts; other files hold weights alone",
    });
  }
  const version = /^[1-9]\d*$/.test(metadata.version ?? "") ? Number(metadata.version) : 0;
  if (version > VERSION) {
    throw new ArtifactError(`${name} has version ${metadata.version}`, {
      because: `this package knows versions up to ${VERSION}`,
      help: "update @ortrain/web",
    });
  }
  const damaged = (because: string): never => {
    throw new ArtifactError(`the metadata of ${name} is damaged`, { because, help: ANEW });
  };
  if (version < UNSEALED_VERSION) damaged(`its version is ${shown(metadata.version)}`);
  if (version > UNSEALED_VERSION && !sealed) {
    throw damagedError(name, `it has no checksum, and each of version ${version} has one`);
  }
  const texts = Object.fromEntries(
    TEXTS.map((key) => [key, metadata[key] ?? damaged(`${key} is missing`)]),
  ) as Record<TextKey, string>;
  const specs = <T extends Spec>(key: TextKey): T[] => {
    try {
      const rows = parseJson(texts[key]);
      if (Array.isArray(rows) && rows.every(isSpec)) return rows as unknown as T[];
    } catch (error) {
      damaged(`${key} is no list: ${(error as Error).message}`);
    }
    return damaged(`${key} is no list of names, dtypes and shapes`);
  };
  const description = {
    parameters: specs<ParameterSpec>("parameters"),
    buffers: specs("buffers"),
    states: specs("states"),
    // Of no use here: Python exports low-rank adapters by it.
    texts: metadata.adapters === undefined ? texts : { ...texts, adapters: metadata.adapters },
  };
  if (texts.model !== sha256(`${texts.parameters}\n${texts.buffers}`)) {
    damaged("`model` is not the hash of `parameters` and `buffers`");
  }
  const integer = (key: string): bigint | undefined => {
    const text = metadata[key];
    if (text === undefined) return undefined;
    const value = /^-?\d{1,19}$/.test(text) ? BigInt(text) : damaged(`${key} is ${shown(text)}`);
    // Models take it as int64, and JavaScript would take what is left of it.
    return value === BigInt.asIntN(64, value) ? value : damaged(`${key} is ${text}`);
  };
  const text = metadata.learning_rate;
  // Number takes an empty text as 0, and hexadecimal digits.
  const rate = text === undefined ? undefined : DECIMAL.test(text) ? Number(text) : Number.NaN;
  if (rate !== undefined && !Number.isFinite(rate)) damaged(`learning_rate is ${shown(text)}`);
  const checkpoint = {
    description,
    tensors,
    properties: new Properties(metadata.properties, name),
    step: integer("step"),
    seed: integer("seed"),
    learningRate: rate,
  };
  const faults = faultsOf(description, tensors, metadata.nominal === "true");
  if (faults.length > 0) {
    const because = listing(faults, MOST_NAMED);
    throw new ArtifactError(`${name} is not whole`, { because, help: ANEW });
  }
  if (!sealed) {
    const help = "save it again with saveCheckpoint(true), or make it anew with generate_artifacts";
    warnUnsealed(name, help);
  }
  return checkpoint;
}

/**
 * Whether a file has a checksum.
 *
 * It is verified before anything is read: damage to the header could say all kinds of things.
 *
 * @throws ArtifactError: it is damaged or cut off.
 */
function checkSeal(file: Uint8Array, name: string): boolean {
  const place = placeOf(file);
  const because = place === undefined ? undefined : damageOf(file, place);
  if (because !== undefined) {
    // What is cut off is told as such.
    if (isCutOff(file)) readSafetensors(file, name);
    throw damagedError(name, because);
  }
  return place !== undefined;
}

function placeOf(file: Uint8Array): Place {
  const start = startOf(file);
  return start === undefined ? undefined : placeInHeader(file, start);
}

/** Writes a checkpoint: the content of the file. Tensors may be missing. */
export function writeCheckpoint(checkpoint: Checkpoint): Uint8Array {
  const { description, tensors, properties, step, seed, learningRate } = checkpoint;
  const metadata: Record<string, string> = {
    format: FORMAT,
    version: String(VERSION),
    checksum: UNSEALED,
    ...description.texts,
    properties: String(properties),
  };
  if (step !== undefined) metadata.step = String(step);
  if (seed !== undefined) metadata.seed = String(seed);
  if (learningRate !== undefined) metadata.learning_rate = String(learningRate);
  const { parameters } = description;
  if (parameters.length > 0 && !parameters.some(({ name }) => tensors.has(name))) {
    metadata.nominal = "true";
  }
  const file = writeSafetensors({ metadata, tensors });
  seal(file, placeOf(file) as number);
  return file;
}

function isSpec(row: unknown): row is Spec {
  const { name, dtype, shape, requires_grad: trained } = (row ?? {}) as Record<string, unknown>;
  return (
    typeof name === "string" &&
    typeof dtype === "string" &&
    Object.hasOwn(WIDTHS, dtype) &&
    Array.isArray(shape) &&
    shape.every((size) => Number.isSafeInteger(size) && size >= 0) &&
    bytesOfShape(dtype as Dtype, shape) !== undefined &&
    ["boolean", "undefined"].includes(typeof trained)
  );
}

/** A text for a message. Blanks would not be seen. */
function shown(text: string | undefined): string {
  return text !== undefined && /^\S+$/.test(text) ? text : JSON.stringify(text);
}

/** What is wrong with the tensors of a file, by what its metadata says. */
function faultsOf(
  { parameters, buffers, states }: Description,
  tensors: ReadonlyMap<string, RawTensor>,
  nominal: boolean,
): string[] {
  const faults = [];
  const hasStates = states.some(({ name }) => tensors.has(name));
  const expected = [...parameters, ...buffers, ...(hasStates ? states : [])];
  for (const spec of expected) {
    const found = tensors.get(spec.name);
    if (!found) {
      if (!nominal) faults.push(`${spec.name} is missing`);
    } else if (found.dtype !== spec.dtype || String(found.shape) !== String(spec.shape)) {
      const listed = `${spec.dtype} [${spec.shape}]`;
      faults.push(`${spec.name} is ${found.dtype} [${found.shape}] and listed as ${listed}`);
    }
  }
  const known = new Set<string>();
  for (const { name } of [...parameters, ...buffers, ...states]) {
    if (known.has(name)) faults.push(`${name} is listed twice`);
    known.add(name);
  }
  for (const name of tensors.keys()) {
    if (!known.has(name)) faults.push(`${name} is not in its list of tensors`);
  }
  return faults;
}
