import assert from "node:assert/strict";
import { it } from "node:test";
import { ArtifactError, readSafetensors, type SafeTensors } from "@ortrain/web/core";
import { readCheckpoint, writeCheckpoint } from "#inside/checkpoint.js";
import { sha256 } from "#inside/sha256.js";
import { artifacts, sealed } from "./files.js";

const FILE = await artifacts("cnn")("checkpoint");
const WRITTEN = writeCheckpoint(readCheckpoint(FILE, "it"));

/** The checkpoint with a change, and a checksum that fits. */
function changed(change: (file: SafeTensors) => void): Uint8Array {
  const file = readSafetensors(WRITTEN);
  change(file);
  return sealed(file);
}

it("a checkpoint of Python is read and written as it is", () => {
  const read = readCheckpoint(FILE, "it");
  assert.equal(read.properties.get("name"), 'the "first"');
  assert.equal(read.learningRate, 0.002);
  const again = readSafetensors(writeCheckpoint(read));
  const { metadata, tensors } = readSafetensors(FILE);
  // Checksums stand for the file, whose tensors another writer may order otherwise.
  const { version, checksum, ...texts } = again.metadata;
  const { version: _, checksum: __, ...expected } = metadata;
  assert.equal(version, "2");
  assert.match(checksum ?? "", /^ortrain\.crc32:/);
  assert.deepEqual(texts, expected);
  assert.deepEqual(new Map([...again.tensors].sort()), new Map([...tensors].sort()));
});

it("what a checkpoint says of low-rank adapters is kept", () => {
  const adapters = '[{"weight":"6.weight","a":"a","b":"b","scale":2.0}]';
  const file = changed(({ metadata: m }) => set(m, "adapters", adapters));
  const again = readSafetensors(writeCheckpoint(readCheckpoint(file, "it")));
  assert.equal(again.metadata.adapters, adapters);
});

type Fault = [what: string, change: (file: SafeTensors) => void, message: RegExp];

const row = (shape: string): string => `[{"name":"x","dtype":"F32","shape":${shape}}]`;
const DEEP = `${"[".repeat(1e5)}${"]".repeat(1e5)}`;

const LISTS: [rows: string, message: RegExp][] = [
  ["{", /is no list: /],
  [DEEP, /is no list: it is nested more than 64 levels deep/],
  ['[{"name":"x","name":"y","dtype":"F32","shape":[1]}]', /is no list: it has "name" twice/],
  ["null", /no list of names, dtypes and shapes/],
  ['[{"name":"x","dtype":"__proto__","shape":[1]}]', /no list of names, dtypes and shapes/],
  [row("[1.5]"), /no list of names, dtypes and shapes/],
  [row('["1"]'), /no list of names, dtypes and shapes/],
  // Each size is a whole number, and the product is none that a number can hold.
  [row("[94906267,94906267]"), /no list of names, dtypes and shapes/],
  [row("[9007199254740991]"), /no list of names, dtypes and shapes/],
  [row("[4503599627370496,4503599627370496,0]"), /no list of names, dtypes and shapes/],
];

const PROPERTIES: [text: string, message: RegExp][] = [
  ["", /the properties of the file are no JSON object/],
  [DEEP, /the properties of the file are no JSON object\n.*more than 64 levels/],
  [`{"a": ${DEEP}}`, /the properties of the file are no JSON object\n.*more than 64 levels/],
  ['{"a": 1, "a": 2}', /the properties of the file are no JSON object\n.*"a" twice/],
  ['{"a": {"a": 1}}', /the property a of the file is no number or string/],
  ['{"__proto__": {"a": 1}}', /the property __proto__ of the file is no number or string/],
];

const FAULTS: Fault[] = [
  ["of another format", ({ metadata: m }) => delete m.format, /no checkpoint of on-device/],
  ["of a newer version", ({ metadata: m }) => set(m, "version", "3"), /has version 3/],
  ["of no version", ({ metadata: m }) => delete m.version, /version is undefined/],
  ...["", " ", "0", "-1", "1.0", "0x2", "1e0", "02", "two", " 2"].map((text): Fault => {
    const message = new RegExp(`version is ${/^\S+$/.test(text) ? text : JSON.stringify(text)}\n`);
    return [`of version "${text}"`, ({ metadata: m }) => set(m, "version", text), message];
  }),
  ["without its lists", ({ metadata: m }) => delete m.states, /states is missing/],
  ["with a list of else", ({ metadata: m }) => set(m, "states", "[1]"), /no list of names/],
  ["of another hash", ({ metadata: m }) => set(m, "buffers", "[]"), /is not the hash/],
  ["with a step of else", ({ metadata: m }) => set(m, "step", "1.5"), /step is 1.5/],
  ...["step", "seed"].flatMap((key) =>
    [
      "",
      " ",
      "\n",
      "0x10",
      "1e3",
      "1_000",
      "+1",
      " 1",
      "1n",
      "9223372036854775808",
      "9".repeat(400),
    ].map((text): Fault => {
      const message = new RegExp(`metadata of the file is damaged\n.*${key} is `);
      return [`with the ${key} "${text}"`, ({ metadata: m }) => set(m, key, text), message];
    }),
  ),
  ...["?", "", " ", "\t\n", "0x10", "0b1", "0o7", "1_0", ".", "1e", "e5", " 1", "1 ", "1,5"]
    .concat("NaN", "Infinity", "-Infinity", "1e999", "null", "true", "[]", "1n", "\u0661")
    .map((text): Fault => {
      const message = /metadata of the file is damaged\n.*learning_rate is /;
      return [
        `with the rate "${text}"`,
        ({ metadata: m }) => set(m, "learning_rate", text),
        message,
      ];
    }),
  ...(["parameters", "buffers", "states"] as const).flatMap((key) =>
    LISTS.map(([rows, message]): Fault => {
      return [
        `whose ${key} are ${shortened(rows)}`,
        ({ metadata: m }) => describe(m, key, rows),
        message,
      ];
    }),
  ),
  [
    "with parameters that are trained or not by a text",
    ({ metadata: m }) => describe(m, "parameters", m.parameters?.replace("false", '"false"') ?? ""),
    /parameters is no list of names/,
  ],
  [
    "with a name in two of its lists",
    ({ metadata: m }) => describe(m, "states", m.buffers ?? ""),
    /1.running_mean is listed twice/,
  ],
  ...PROPERTIES.map(([text, message]): Fault => {
    return [
      `with the properties ${shortened(text)}`,
      ({ metadata: m }) => set(m, "properties", text),
      message,
    ];
  }),
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

for (const [text, rate] of [
  ["0.002", 0.002],
  ["1e-05", 1e-5],
  ["1e+16", 1e16],
  ["5", 5],
  ["-0.5", -0.5],
] as const) {
  it(`the learning rate ${text} is read`, () => {
    const file = changed(({ metadata: m }) => set(m, "learning_rate", text));
    assert.equal(readCheckpoint(file, "the file").learningRate, rate);
  });
}

it("the largest and the smallest seed are read", () => {
  for (const seed of [2n ** 63n - 1n, -(2n ** 63n)]) {
    const file = changed(({ metadata: m }) => set(m, "seed", String(seed)));
    assert.equal(readCheckpoint(file, "the file").seed, seed);
  }
});

/** Sets one of the lists, and the hash of them. */
function describe(metadata: Record<string, string>, key: string, rows: string): void {
  metadata[key] = rows;
  metadata.model = sha256(`${metadata.parameters}\n${metadata.buffers}`);
}

function shortened(text: string): string {
  return text.length > 70 ? `${text.slice(0, 20)} and ${text.length - 20} characters` : text;
}

function set(metadata: Record<string, string>, key: string, text: string): void {
  metadata[key] = text;
}
