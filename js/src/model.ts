import type { InferenceSession, Tensor } from "onnxruntime-common";
import { isResult, LAZY_RESET_GRAD, LEARNING_RATE, MODEL_HASH, SEED, STEP } from "./contract.js";
import { ArtifactError } from "./errors.js";
import { checkFeeds, type Feeds, type Fetches, fetchedNames } from "./feeds.js";
import { metadataOf } from "./onnx.js";
import type { Platform, Source } from "./runtime.js";
import { checkModelSeal, isSealable, warnUnsealed } from "./seal.js";

/** Values by the names of inputs or outputs. */
export type Values = Record<string, Tensor>;

/** Inputs that every session feeds by itself. */
const RESERVED = new Set([LAZY_RESET_GRAD, LEARNING_RATE, STEP, SEED]);

// What fails is thrown, and need not be printed as well.
const QUIET = { logSeverityLevel: 4 } as const;

/** One of the models, in a session of the runtime. */
export class Model {
  readonly #session: InferenceSession;
  /** Those that the user feeds. */
  readonly #userInputs: readonly InferenceSession.ValueMetadata[];

  private constructor(
    /** What to call it in an error. */
    readonly name: string,
    /** The checkpoint's `model` that it was made with; undefined where it does not say. */
    readonly hash: string | undefined,
    session: InferenceSession,
    isState: (input: string) => boolean,
  ) {
    this.#session = session;
    this.#userInputs = session.inputMetadata.filter(
      (input) => !RESERVED.has(input.name) && !isState(input.name),
    );
  }

  /**
   * Loads a model.
   *
   * @param isState - whether an input is fed from what training keeps.
   * @throws ArtifactError: it cannot be read, is damaged, or the runtime refuses it.
   */
  static async load(
    platform: Platform,
    source: Source,
    name: string,
    options: InferenceSession.SessionOptions,
    isState: (input: string) => boolean,
  ): Promise<Model> {
    const content = await readSource(platform, source, name);
    const file = label(source, name);
    if (!checkModelSeal(content, file) && isSealable(content)) {
      warnUnsealed(file, "make it anew with generate_artifacts");
    }
    try {
      const all = { ...QUIET, ...platform.sessionOptions, ...options };
      const session = await platform.runtime.InferenceSession.create(content, all);
      return new Model(name, metadataOf(content, MODEL_HASH), session, isState);
    } catch (error) {
      throw new ArtifactError(`onnxruntime cannot load ${file}`, {
        because: (error as Error).message,
        help: "give the file of generate_artifacts, and a runtime that has its operators",
        cause: error,
      });
    }
  }

  get inputs(): readonly InferenceSession.ValueMetadata[] {
    return this.#session.inputMetadata;
  }

  get outputs(): readonly string[] {
    return this.#session.outputNames;
  }

  get userInputNames(): string[] {
    return this.#userInputs.map(({ name }) => name);
  }

  get resultNames(): string[] {
    return this.outputs.filter(isResult);
  }

  /**
   * Checks what a user gives to a call.
   *
   * @returns the names of what to fetch.
   * @throws InputError: the model takes no such feeds, or has no such results.
   */
  check(feeds: Feeds, fetches?: Fetches): string[] {
    checkFeeds(feeds, this.#userInputs, this.name);
    return fetchedNames(fetches, this.resultNames, this.name);
  }

  /** Runs the model on all its inputs. */
  async run(
    values: Values,
    fetches: readonly string[],
    options?: InferenceSession.RunOptions,
  ): Promise<Values> {
    return { ...(await this.#session.run(values, fetches, { ...QUIET, ...options })) };
  }

  /** Frees the session. */
  async release(): Promise<void> {
    await this.#session.release();
  }
}

/**
 * The content of a file.
 *
 * @throws ArtifactError: it cannot be read.
 */
export async function readSource(
  platform: Platform,
  source: Source,
  name: string,
): Promise<Uint8Array> {
  if (source instanceof Uint8Array) return source;
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  try {
    return await platform.read(source);
  } catch (error) {
    throw new ArtifactError(`cannot read ${label(source, name)}`, {
      because: (error as Error).message,
      help: "give the path or URL of a file of generate_artifacts, or its content",
      cause: error,
    });
  }
}

/** What to call a file in an error. */
export function label(source: Source, name: string): string {
  if (typeof source === "string" || source instanceof URL) return `${name} ${source}`;
  return `${name} (${source.byteLength} bytes)`;
}
