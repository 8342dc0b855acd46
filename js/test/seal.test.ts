import assert from "node:assert/strict";
import { it, type TestContext } from "node:test";
import {
  ArtifactError,
  Properties,
  type RawTensor,
  readSafetensors,
  type TrainingSessionFiles,
  trainingOn,
  writeSafetensors,
} from "@ortrain/web/core";
import type { InferenceSession } from "onnxruntime-common";
import { type Checkpoint, readCheckpoint, writeCheckpoint } from "#inside/checkpoint.js";
import { crc32 } from "#inside/crc32.js";
import { checkModelSeal, placeInModel, seal, UNSEALED } from "#inside/seal.js";
import { sha256 } from "#inside/sha256.js";
import { artifacts, ENTRIES } from "./files.js";
import type { Entry } from "./scenario.js";

const read = artifacts("mlp");
const node = ENTRIES["onnxruntime-node"] as Entry;
const ascii = (text: string): Uint8Array => new TextEncoder().encode(text);
// Byte by byte, there and back; TextDecoder has Windows-1252 for it.
const latin1 = (bytes: Uint8Array): string => Buffer.from(bytes).toString("latin1");
const bytesOf = (text: string): Uint8Array => new Uint8Array(Buffer.from(text, "latin1"));
const concat = (...parts: Uint8Array[]): Uint8Array =>
  Uint8Array.from(parts.flatMap((p) => [...p]));

/** All that a checkpoint can hold, in few bytes. */
function small(): Checkpoint {
  const parameters = '[{"name":"w","dtype":"F32","shape":[2],"requires_grad":true}]';
  const buffers = '[{"name":"n","dtype":"I64","shape":[]}]';
  const states = '[{"name":"w.m","parameter":"w","kind":"m","dtype":"F32","shape":[2]}]';
  const tensor = (dtype: RawTensor["dtype"], shape: number[], start: number): RawTensor => {
    return { dtype, shape, bytes: Uint8Array.from({ length: 8 }, (_, i) => start + 3 * i) };
  };
  const model = sha256(`${parameters}\n${buffers}`);
  return {
    description: {
      parameters: JSON.parse(parameters),
      buffers: JSON.parse(buffers),
      states: JSON.parse(states),
      texts: { parameters, buffers, states, model },
    },
    tensors: new Map([
      ["n", tensor("I64", [], 1)],
      ["w", tensor("F32", [2], 5)],
      ["w.m", tensor("F32", [2], 7)],
    ]),
    properties: new Properties('{"epoch": 2, "text": "a \\"b\\": \\u00e9"}'),
    step: 12n,
    seed: 34n,
    learningRate: 0.002,
  };
}

/** What is read of a checkpoint, to compare. */
function contentOf(file: Uint8Array): unknown {
  const { properties, ...rest } = readCheckpoint(file, "the file");
  return { ...rest, properties: String(properties) };
}

/** The same with one bit the other way round. */
function flipped(file: Uint8Array, bit: number): Uint8Array {
  const copy = file.slice();
  copy[bit >> 3] = (copy[bit >> 3] as number) ^ (1 << (bit & 7));
  return copy;
}

/** A checkpoint as an earlier version wrote it, with a change. */
function earlier(change: (metadata: Record<string, string>) => void = () => undefined): Uint8Array {
  const { metadata, tensors } = readSafetensors(writeCheckpoint(small()));
  delete metadata.checksum;
  metadata.version = "1";
  change(metadata);
  return writeSafetensors({ metadata, tensors });
}

/** What is written to the console while a test runs. */
function warningsOf(test: TestContext): string[] {
  const warnings: string[] = [];
  test.mock.method(console, "warn", (text: string) => warnings.push(text));
  return warnings;
}

function assertRefused(call: () => unknown, message: RegExp, what = ""): void {
  assert.throws(
    call,
    (error: Error) => {
      assert.ok(error instanceof ArtifactError, `${what}: ${error.stack}`);
      assert.match(error.message, message, what);
      return true;
    },
    what,
  );
}

// -- checkpoints -----------------------------------------------------------------------------------

it("a checkpoint is written with the checksum of the file that has zeros in its place", () => {
  const file = writeCheckpoint(small());
  const { metadata } = readSafetensors(file);
  assert.equal(metadata.version, "2");
  const digits = /^ortrain\.crc32:([0-9a-f]{8})$/.exec(metadata.checksum ?? "")?.[1] as string;
  const text = latin1(file);
  const zeroed = text.replace(`"checksum":"ortrain.crc32:${digits}"`, `"checksum":"${UNSEALED}"`);
  const computed = crc32(bytesOf(zeroed));
  assert.equal(digits, computed.toString(16).padStart(8, "0"));
});

it("a checkpoint is read as it was written, without a warning", (test) => {
  const warnings = warningsOf(test);
  const { properties, ...rest } = small();
  assert.deepEqual(contentOf(writeCheckpoint(small())), {
    ...rest,
    properties: String(properties),
  });
  assert.deepEqual(warnings, []);
});

it("a checkpoint with any bit the other way round is refused", (test) => {
  const warnings = warningsOf(test);
  const file = writeCheckpoint(small());
  for (let bit = 0; bit < 8 * file.length; bit++) {
    const damaged = flipped(file, bit);
    const what = `bit ${bit} of ${8 * file.length}`;
    assertRefused(() => readCheckpoint(damaged, "the file"), /the file.*because: .*help: /s, what);
  }
  assert.deepEqual(warnings, []);
});

it("damage is told as such wherever the checksum can be found", () => {
  const file = writeCheckpoint(small());
  const text = latin1(file);
  const key = text.indexOf('"checksum"');
  const digits = text.indexOf("ortrain.crc32:") + "ortrain.crc32:".length;
  for (let bit = 8 * 8; bit < 8 * file.length; bit++) {
    // What precedes the key may be the quote's backslash.
    if (bit >> 3 >= key - 1 && bit >> 3 < digits) continue;
    const message = /the file is damaged\n {2}because: its checksum is .*, and its content has /;
    assertRefused(() => readCheckpoint(flipped(file, bit), "the file"), message, `bit ${bit}`);
  }
});

it("a checkpoint that is cut off anywhere, or goes on, is told as such", () => {
  const file = writeCheckpoint(small());
  for (let length = 0; length < file.length; length++) {
    assertRefused(
      () => readCheckpoint(file.subarray(0, length), "the file"),
      /cannot read the file\n.*(fewer than|says to have|tensors take).*cut off/s,
      `${length} bytes`,
    );
  }
  const longer = concat(file, Uint8Array.of(0));
  assertRefused(() => readCheckpoint(longer, "the file"), /tensors take 24 bytes, and 25 follow/);
});

it("a checkpoint lies anywhere in its memory", () => {
  const file = writeCheckpoint(small());
  for (let start = 0; start < 4; start++) {
    const memory = new Uint8Array(file.length + 7).fill(255);
    memory.set(file, start);
    readCheckpoint(memory.subarray(start, start + file.length), "the file");
  }
});

it("a checkpoint of version 2 without a checksum is refused", () => {
  const without = earlier((metadata) => {
    metadata.version = "2";
  });
  assertRefused(() => readCheckpoint(without, "the file"), /damaged.*it has no checksum/s);
});

it("a checkpoint of version 1 is read with one warning, and has a checksum once saved", (test) => {
  const warnings = warningsOf(test);
  const checkpoint = readCheckpoint(earlier(), "the file");
  assert.equal(warnings.length, 1);
  assert.match(
    warnings[0] ?? "",
    /^the file has no checksum\n.*would not be seen\n.*save it again/s,
  );
  assert.deepEqual(contentOf(earlier()), contentOf(writeCheckpoint(checkpoint)));
  assert.equal(warnings.length, 2);
});

it("a checkpoint of version 1 that is refused is not warned of as well", (test) => {
  const warnings = warningsOf(test);
  const other = earlier((metadata) => {
    metadata.model = "";
  });
  assertRefused(() => readCheckpoint(other, "the file"), /not the hash/);
  assert.deepEqual(warnings, []);
});

it("a checksum in a checkpoint of version 1 is verified", (test) => {
  const warnings = warningsOf(test);
  const file = earlier((metadata) => {
    metadata.checksum = UNSEALED;
  });
  assertRefused(() => readCheckpoint(file, "the file"), /its checksum is 00000000/);
  seal(file, latin1(file).indexOf(UNSEALED) + UNSEALED.length - 8);
  readCheckpoint(file, "the file");
  assert.deepEqual(warnings, []);
});

it("a property or a tensor that looks like a checksum is none", (test) => {
  const warnings = warningsOf(test);
  const mark = `"checksum":"${UNSEALED}"`;
  const checkpoint = small();
  checkpoint.properties.set("checksum", UNSEALED).set(mark, mark);
  checkpoint.tensors.set("n", { dtype: "I64", shape: [], bytes: ascii("ortrain.") });
  checkpoint.tensors.set("w", { dtype: "F32", shape: [2], bytes: ascii("crc32:00") });
  const file = writeCheckpoint(checkpoint);
  assert.equal(readCheckpoint(file, "the file").properties.get(mark), mark);
  assert.deepEqual(warnings, []);
  const v1 = earlier((metadata) => {
    metadata.properties = String(checkpoint.properties);
  });
  assert.equal(readCheckpoint(v1, "the file").properties.get("checksum"), UNSEALED);
  assert.equal(warnings.length, 1);
});

it("blanks may stand around a checksum, as other writers of JSON put them", () => {
  const file = writeCheckpoint(small());
  const text = latin1(file).slice(8).replace('"checksum":"', '"checksum" :\n  "');
  const spread = concat(file.subarray(0, 8), ascii(text));
  const start = Number(new DataView(file.buffer).getBigUint64(0, true));
  new DataView(spread.buffer).setBigUint64(0, BigInt(start + 4), true);
  assertRefused(() => readCheckpoint(spread, "the file"), /its checksum is/);
  seal(spread, latin1(spread).indexOf("ortrain.crc32:") + "ortrain.crc32:".length);
  assert.deepEqual(contentOf(spread), contentOf(file));
});

// -- models ----------------------------------------------------------------------------------------

const MODELS = ["eval_model.onnx", "training_model.onnx", "optimizer_model.onnx"];

/** An entry of a model's metadata. */
function entry(key: string, value: string): Uint8Array {
  const row = (tag: number, content: Uint8Array): Uint8Array =>
    concat(Uint8Array.of(tag, content.length), content);
  return row(0x72, concat(row(0x0a, ascii(key)), row(0x12, ascii(value))));
}

/** A model with a last entry of its metadata. */
function withEntry(model: Uint8Array, key: string, value: string): Uint8Array {
  return concat(model, entry(key, value));
}

/** A model with a checksum, which stands first; one in ORT format has it behind its end. */
function sealedModel(model: Uint8Array): Uint8Array {
  const isOrt = latin1(model.subarray(4, 8)) === "ORTM";
  const mark = isOrt ? UNSEALED.replace("crc32", "ort32") : UNSEALED;
  const file = isOrt ? concat(model, ascii(mark)) : concat(entry("ortrain.checksum", mark), model);
  seal(file, placeInModel(file) as number);
  return file;
}

/** A model as an earlier version wrote it. */
function unsealedModel(model: Uint8Array): Uint8Array {
  return bytesOf(latin1(model).replaceAll(/ortrain\.(crc|ort)32:/g, "ortrain.$133:"));
}

/** Whole numbers below a limit, by the generator of Park and Miller. */
function* drawn(count: number, limit: number): Generator<number> {
  let state = 20240607;
  for (let i = 0; i < count; i++) {
    state = Number((BigInt(state) * 48271n) % 2147483647n);
    yield state % limit;
  }
}

for (const name of [...MODELS, "eval_model.ort"]) {
  it(`${name} with a bit the other way round is refused, or has no checksum`, async () => {
    const file = sealedModel(unsealedModel(await read(name)));
    assert.equal(checkModelSeal(file, name), true);
    const digits = placeInModel(file) as number;
    const mark = digits - "ortrain.crc32:".length;
    const end = Math.min(file.length, mark + 64);
    const around = Array.from({ length: 8 * (end - mark) }, (_, i) => 8 * mark + i);
    for (const bit of [...drawn(2000, 8 * file.length), ...around]) {
      const damaged = flipped(file, bit);
      if (bit >= 8 * mark && bit < 8 * digits) {
        assert.equal(placeInModel(damaged), placeInModel(file.subarray(0, mark)));
        continue;
      }
      const message =
        /the file is damaged\n.*its checksum is .*, and its content has .*whole copy/s;
      assertRefused(() => checkModelSeal(damaged, "the file"), message, `bit ${bit}`);
    }
  });

  it(`${name} that is cut off within its checksum or goes on is refused`, async () => {
    const file = sealedModel(unsealedModel(await read(name)));
    const digits = placeInModel(file) as number;
    for (let length = 0; length < file.length; length++) {
      const part = file.subarray(0, length);
      if (length < digits) assert.equal(checkModelSeal(part, "the file"), false);
      else assertRefused(() => checkModelSeal(part, "the file"), /damaged/, `${length} bytes`);
    }
    assertRefused(() => checkModelSeal(concat(file, Uint8Array.of(0)), "the file"), /damaged/);
  });
}

it("a model that is cut off before its checksum is refused, or is the same model", async () => {
  const file = sealedModel(unsealedModel(unsealedModel(await read("eval_model.onnx"))));
  const create = (bytes: Uint8Array): Promise<InferenceSession> =>
    node.ort.InferenceSession.create(bytes, { logSeverityLevel: 4, intraOpNumThreads: 1 });
  const whole = await create(file);
  const loaded = [];
  for (let length = 0; length < (placeInModel(file) as number); length++) {
    const part = await create(file.subarray(0, length)).catch(() => undefined);
    if (!part) continue;
    loaded.push(length);
    assert.deepEqual(part.inputMetadata, whole.inputMetadata);
    assert.deepEqual(part.outputMetadata, whole.outputMetadata);
    await part.release();
  }
  // Where one of the last fields, of metadata, is over.
  assert.ok(loaded.length < 6, String(loaded));
  await whole.release();
});

it("the first checksum of a model counts, as text after it may be a user's", async () => {
  const model = concat(
    unsealedModel(unsealedModel(await read("eval_model.onnx"))),
    Uint8Array.of(0x12, 42),
  );
  assert.equal(
    checkModelSeal(
      sealedModel(concat(model, ascii("of the model's own: ortrain.crc32:deadbeef"))),
      "it",
    ),
    true,
  );
});

/** Makes a session, and tells what was warned of. */
async function created(files: TrainingSessionFiles): Promise<void> {
  const session = await node.TrainingSession.create(files, { intraOpNumThreads: 1 });
  await session.release();
}

it("artifacts with checksums train without a warning", async (test) => {
  const warnings = warningsOf(test);
  const checkpoint = writeCheckpoint(readCheckpoint(await read("checkpoint"), "it"));
  warnings.length = 0;
  await created({
    checkpointState: checkpoint,
    trainModel: sealedModel(unsealedModel(await read("training_model.onnx"))),
    evalModel: sealedModel(unsealedModel(await read("eval_model.onnx"))),
  });
  assert.deepEqual(warnings, []);
});

for (const format of ["onnx", "ort"]) {
  it(`models in ${format} without checksums train, with a warning for each`, async (test) => {
    const warnings = warningsOf(test);
    const checkpoint = writeCheckpoint(readCheckpoint(await read("checkpoint"), "it"));
    warnings.length = 0;
    await created({
      checkpointState: checkpoint,
      trainModel: unsealedModel(await read(`training_model.${format}`)),
      evalModel: unsealedModel(await read(`eval_model.${format}`)),
    });
    assert.equal(warnings.length, 2);
    for (const [i, name] of ["trainModel", "evalModel"].entries()) {
      assert.match(warnings[i] ?? "", new RegExp(`^${name} \\(\\d+ bytes\\) has no checksum`));
      assert.match(warnings[i] ?? "", /help: {4}make it anew with generate_artifacts/);
    }
  });
}

it("the checksum of an ONNX file is none of the ORT file that was made of it", async (test) => {
  const warnings = warningsOf(test);
  const converted = concat(unsealedModel(await read("eval_model.ort")), ascii(UNSEALED));
  assert.equal(checkModelSeal(converted, "it"), false);
  const both = sealedModel(converted);
  assert.equal(checkModelSeal(both, "it"), true);
  for (let bit = 8 * 4; bit < 8 * 8; bit++) {
    assertRefused(() => checkModelSeal(flipped(both, bit), "it"), /damaged/);
  }
  assert.deepEqual(warnings, []);
});

it("a model that says to have no checksum is not warned of", async (test) => {
  const warnings = warningsOf(test);
  const checkpoint = writeCheckpoint(readCheckpoint(await read("checkpoint"), "it"));
  warnings.length = 0;
  const model = unsealedModel(unsealedModel(await read("eval_model.onnx")));
  const text = latin1(model).replaceAll("ortrain.checksum", "ortrain.checksux");
  const evalModel = withEntry(bytesOf(text), "ortrain.checksum", "none");
  await created({ checkpointState: checkpoint, evalModel });
  assert.deepEqual(warnings, []);
});

it("a model that is none of ours needs no checksum", async (test) => {
  const warnings = warningsOf(test);
  const checkpoint = writeCheckpoint(readCheckpoint(await read("checkpoint"), "it"));
  warnings.length = 0;
  const model = latin1(unsealedModel(unsealedModel(await read("eval_model.onnx"))));
  const evalModel = bytesOf(model.replace("ortrain.model", "another.name!"));
  await created({ checkpointState: checkpoint, evalModel });
  assert.deepEqual(warnings, []);
});

it("a damaged model does not come to onnxruntime", async () => {
  const session = trainingOn({
    runtime: {
      InferenceSession: { create: () => assert.fail("it came") },
      Tensor: node.ort.Tensor,
    },
    read: () => assert.fail("there is nothing to read"),
  });
  const file = sealedModel(unsealedModel(await read("eval_model.onnx")));
  const checkpointState = writeCheckpoint(readCheckpoint(await read("checkpoint"), "it"));
  await assert.rejects(
    session.create({ checkpointState, evalModel: flipped(file, 100) }),
    (error: Error) => {
      assert.ok(error instanceof ArtifactError);
      assert.match(error.message, /evalModel \(\d+ bytes\) is damaged/);
      return true;
    },
  );
});
