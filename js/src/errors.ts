/** What is known of a failure besides what happened. */
export interface Reason {
  because?: string;
  help?: string;
  cause?: unknown;
}

/** Base of all errors of this package: what happened, why it matters, and the way out. */
export class OrtrainError extends Error {
  constructor(what: string, reason: Reason = {}) {
    const { cause } = reason;
    super(spell(what, reason), cause === undefined ? undefined : { cause });
    this.name = new.target.name;
  }
}

/** A checkpoint or a model that cannot be trained: missing, damaged, or not of the others. */
export class ArtifactError extends OrtrainError {}

/** Feeds, fetches or another argument that a call cannot take. Nothing has changed. */
export class InputError extends OrtrainError {}

/** A call at the wrong time, or on a session made without the model that it needs. */
export class StateError extends OrtrainError {}

/** Says what does not stop a call: on the console, as there is nobody else to tell. */
export function warn(what: string, reason: Reason): void {
  console.warn(spell(what, reason));
}

function spell(what: string, { because, help }: Reason): string {
  const rows = [what];
  if (because) rows.push(`  because: ${because}`);
  if (help) rows.push(`  help:    ${help}`);
  return rows.join("\n");
}

/** The first few of a list, for a message. */
export function listing(names: readonly string[], most = 8): string {
  const rest = names.length - most;
  const shown = names.slice(0, rest > 0 ? most : names.length).join(", ");
  return names.length === 0 ? "none" : rest > 0 ? `${shown} and ${rest} more` : shown;
}
