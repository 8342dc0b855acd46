/**
 * The checkpoint: safetensors, with what training needs to know in its metadata.
 *
 * See docs/ondevice-contract.md for the keys.
 */
import { ArtifactError, listing } from "./errors.js";
import { Properties } from "./properties.js";
import {
  type Dtype,
  type RawTensor,
  readSafetensors,
  WIDTHS,
  writeSafetensors,
} from "./safetensors.js";
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
  readonly texts: Readonly<Record<TextKey, string>>;
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
const VERSION = 1;
const TEXTS = ["parameters", "buffers", "states", "model"] as const;
const ANEW = "take a whole copy of it, or make it anew with generate_artifacts";
const MOST_NAMED = 3;

/**
 * Reads a checkpoint.
 *
 * @param file - its content.
 * @param name - what to call it in an error.
 * @throws ArtifactError: it is cut off, no checkpoint, of a newer version, or its tensors are not
 *   those that it lists.
 */
export function readCheckpoint(file: Uint8Array, name: string): Checkpoint {
  const { metadata, tensors } = readSafetensors(file, name);
  if (metadata.format !== FORMAT) {
    throw new ArtifactError(`${name} is no checkpoint of on-device training`, {
      because: `its metadata does not say that its format is ${FORMAT}`,
      help: "give the file `checkpoint` of generate_artifacts; other files hold weights alone",
    });
  }
  if (Number(metadata.version) > VERSION) {
    throw new ArtifactError(`${name} has version ${metadata.version}`, {
      because: `this package knows versions up to ${VERSION}`,
      help: "update @ortrain/web",
    });
  }
  const damaged = (because: string): never => {
    throw new ArtifactError(`the metadata of ${name} is damaged`, { because, help: ANEW });
  };
  if (Number(metadata.version) !== VERSION) damaged(`its version is ${metadata.version}`);
  const texts = Object.fromEntries(
    TEXTS.map((key) => [key, metadata[key] ?? damaged(`${key} is missing`)]),
  ) as Record<TextKey, string>;
  const specs = <T extends Spec>(key: TextKey): T[] =>
    (parseSpecs(texts[key]) ?? damaged(`${key} is no list of names, dtypes and shapes`)) as T[];
  const description = {
    parameters: specs<ParameterSpec>("parameters"),
    buffers: specs("buffers"),
    states: specs("states"),
    texts,
  };
  if (texts.model !== sha256(`${texts.parameters}\n${texts.buffers}`)) {
    damaged("`model` is not the hash of `parameters` and `buffers`");
  }
  const integer = (key: string): bigint | undefined => {
    const text = metadata[key];
    if (text !== undefined && !/^-?\d+$/.test(text)) damaged(`${key} is ${text}`);
    return text === undefined ? undefined : BigInt(text);
  };
  const rate = metadata.learning_rate === undefined ? undefined : Number(metadata.learning_rate);
  if (rate !== undefined && !Number.isFinite(rate)) {
    damaged(`learning_rate is ${metadata.learning_rate}`);
  }
  const checkpoint = {
    description,
    tensors,
    properties: new Properties(metadata.properties),
    step: integer("step"),
    seed: integer("seed"),
    learningRate: rate,
  };
  const faults = faultsOf(description, tensors, metadata.nominal === "true");
  if (faults.length > 0) {
    const because = listing(faults, MOST_NAMED);
    throw new ArtifactError(`${name} is not whole`, { because, help: ANEW });
  }
  return checkpoint;
}

/** Writes a checkpoint: the content of the file. Tensors may be missing. */
export function writeCheckpoint(checkpoint: Checkpoint): Uint8Array {
  const { description, tensors, properties, step, seed, learningRate } = checkpoint;
  const metadata: Record<string, string> = {
    format: FORMAT,
    version: String(VERSION),
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
  return writeSafetensors({ metadata, tensors });
}

function parseSpecs(text: string): Spec[] | undefined {
  try {
    const rows: unknown = JSON.parse(text);
    return Array.isArray(rows) && rows.every(isSpec) ? rows : undefined;
  } catch {
    return undefined;
  }
}

function isSpec(row: unknown): row is Spec {
  const { name, dtype, shape } = (row ?? {}) as Record<string, unknown>;
  return (
    typeof name === "string" &&
    typeof dtype === "string" &&
    Object.hasOwn(WIDTHS, dtype) &&
    Array.isArray(shape) &&
    shape.every((size) => Number.isSafeInteger(size) && size >= 0)
  );
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
  const known = new Set(expected.map(({ name }) => name));
  for (const name of tensors.keys()) {
    if (!known.has(name)) faults.push(`${name} is not in its list of tensors`);
  }
  return faults;
}
