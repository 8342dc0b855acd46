import assert from "node:assert/strict";
import { it } from "node:test";
import {
  ArtifactError,
  readSafetensors,
  type SafeTensors,
  writeSafetensors,
} from "@ortrain/web/core";
import { readCheckpoint, writeCheckpoint } from "#inside/checkpoint.js";
import { artifacts } from "./files.js";

const FILE = await artifacts("cnn")("checkpoint");

/** The checkpoint with a change. */
function changed(change: (file: SafeTensors) => void): Uint8Array {
  const file = readSafetensors(FILE);
  change(file);
  return writeSafetensors(file);
}

it("a checkpoint of Python is read and written as it is", () => {
  const read = readCheckpoint(FILE, "it");
  assert.equal(read.properties.get("name"), 'the "first"');
  assert.equal(read.learningRate, 0.002);
  const again = readSafetensors(writeCheckpoint(read));
  const { metadata, tensors } = readSafetensors(FILE);
  assert.deepEqual(again.metadata, metadata);
  assert.deepEqual(new Map([...again.tensors].sort()), new Map([...tensors].sort()));
});

const FAULTS: [what: string, change: (file: SafeTensors) => void, message: RegExp][] = [
  ["of another format", ({ metadata: m }) => delete m.format, /no checkpoint of on-device/],
  ["of a newer version", ({ metadata: m }) => set(m, "version", "2"), /has version 2/],
  ["of no version", ({ metadata: m }) => delete m.version, /version is undefined/],
  ["without its lists", ({ metadata: m }) => delete m.states, /states is missing/],
  ["with a list of else", ({ metadata: m }) => set(m, "states", "[1]"), /no list of names/],
  ["of another hash", ({ metadata: m }) => set(m, "buffers", "[]"), /is not the hash/],
  ["with a step of else", ({ metadata: m }) => set(m, "step", "1.5"), /step is 1.5/],
  ["with a rate of else", ({ metadata: m }) => set(m, "learning_rate", "?"), /rate is \?/],
  ["without a parameter", ({ tensors: t }) => t.delete("0.weight"), /0.weight is missing/],
  ["without a buffer", ({ tensors: t }) => t.delete("1.running_var"), /running_var is missing/],
  [
    "with one of the states",
    ({ tensors: t }) =>
      t.set("6.bias.exp_avg", { dtype: "F32", shape: [10], bytes: new Uint8Array(40) }),
    /0.weight.exp_avg is missing/,
  ],
  [
    "with a tensor too many",
    ({ tensors: t }) => t.set("x", { dtype: "U8", shape: [0], bytes: new Uint8Array() }),
    /x is not in its list/,
  ],
  [
    "with a tensor of another shape",
    ({ tensors: t }) => t.set("6.bias", { dtype: "F32", shape: [0], bytes: new Uint8Array() }),
    /6.bias is F32 \[0\] and listed as F32 \[10\]/,
  ],
];

for (const [what, change, message] of FAULTS) {
  it(`a checkpoint ${what} is refused`, () => {
    const file = changed(change);
    assert.throws(
      () => readCheckpoint(file, "the file"),
      (error: Error) => {
        assert.ok(error instanceof ArtifactError);
        assert.match(error.message, /the file/);
        assert.match(error.message, message);
        return true;
      },
    );
  });
}

function set(metadata: Record<string, string>, key: string, text: string): void {
  metadata[key] = text;
}
