import { ArtifactError, InputError } from "./errors.js";
import { entriesOf, parseJson } from "./json.js";

/** What a property can be. A bigint is an int that a number cannot hold. */
export type Property = number | bigint | string;

/**
 * The user's own numbers and strings in a checkpoint, by name.
 *
 * JSON of other languages tells `2.0` from `2` and holds ints beyond 2^53. What is not set anew is
 * therefore saved as it was spelled.
 */
export class Properties implements Iterable<[string, Property]> {
  readonly #texts: Map<string, string>;

  /**
   * @param json - an object of numbers and strings.
   * @param name - what to call the checkpoint in an error.
   * @throws ArtifactError: it is something else.
   */
  constructor(json = "{}", name = "the checkpoint") {
    const refuse = (what: string, because?: string): never => {
      const help = "the metadata is damaged: take another copy of the checkpoint";
      throw new ArtifactError(what, because === undefined ? { help } : { because, help });
    };
    let values: unknown;
    try {
      values = parseJson(json);
    } catch (error) {
      refuse(`the properties of ${name} are no JSON object`, (error as Error).message);
    }
    if (typeof values !== "object" || values === null || Array.isArray(values)) {
      refuse(`the properties of ${name} are no JSON object`);
    }
    for (const [property, value] of Object.entries(values as object)) {
      if (typeof value !== "number" && typeof value !== "string") {
        refuse(`the property ${property} of ${name} is no number or string`);
      }
    }
    this.#texts = entriesOf(json);
  }

  /** Names, in order. */
  get names(): string[] {
    return [...this.#texts.keys()];
  }

  /** The value of a property; undefined where there is none. */
  get(name: string): Property | undefined {
    const text = this.#texts.get(name);
    if (text === undefined) return undefined;
    const value = JSON.parse(text) as number | string;
    const rounded = typeof value === "number" && /^-?\d+$/.test(text);
    return rounded && !Number.isSafeInteger(value) ? BigInt(text) : value;
  }

  /**
   * Sets a property. A number without fraction is an int where other languages read it.
   *
   * @throws InputError: it is NaN, or no number or string.
   */
  set(name: string, value: Property): this {
    if (!["number", "bigint", "string"].includes(typeof value) || Number.isNaN(value)) {
      throw new InputError(`the property ${name} cannot be ${String(value)}`, {
        because: "properties are numbers and strings, and JSON has no NaN",
        help: "convert it, for example with String(value)",
      });
    }
    this.#texts.set(name, spell(value));
    return this;
  }

  /** Whether there is such a property. */
  has(name: string): boolean {
    return this.#texts.has(name);
  }

  /** Removes a property; tells whether there was one. */
  delete(name: string): boolean {
    return this.#texts.delete(name);
  }

  *[Symbol.iterator](): Iterator<[string, Property]> {
    for (const name of this.#texts.keys()) yield [name, this.get(name) as Property];
  }

  /** The JSON object of a checkpoint's metadata. */
  toString(): string {
    const rows = [...this.#texts].map(([name, text]) => `${JSON.stringify(name)}: ${text}`);
    return `{${rows.join(", ")}}`;
  }
}

/** JSON has no infinity, but a number too large for a float is read as such. */
function spell(value: Property): string {
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "bigint" || Number.isSafeInteger(value)) return String(value);
  return Number.isFinite(value) ? value.toExponential() : value > 0 ? "1e999" : "-1e999";
}
