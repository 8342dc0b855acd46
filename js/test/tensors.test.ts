import assert from "node:assert/strict";
import { it } from "node:test";
import { ArtifactError, type Dtype } from "@ortrain/web/core";
import { bytesOf, makeTensor } from "#inside/tensors.js";
import { ENTRIES } from "./files.js";

const TYPES: [Dtype, string, number][] = [
  ["BOOL", "bool", 1],
  ["U8", "uint8", 1],
  ["I8", "int8", 1],
  ["U16", "uint16", 2],
  ["I16", "int16", 2],
  ["F16", "float16", 2],
  ["U32", "uint32", 4],
  ["I32", "int32", 4],
  ["F32", "float32", 4],
  ["U64", "uint64", 8],
  ["I64", "int64", 8],
  ["F64", "float64", 8],
];

for (const [runtime, { ort }] of Object.entries(ENTRIES)) {
  it(`tensors of ${runtime} keep the bytes of every dtype`, async () => {
    for (const [dtype, type, width] of TYPES) {
      const bytes = Uint8Array.from({ length: 2 * width }, (_, i) => i % 2);
      const tensor = makeTensor(ort, { name: "x", dtype, shape: [2] }, bytes);
      assert.equal(tensor.type, type);
      assert.deepEqual(tensor.dims, [2]);
      assert.deepEqual(await bytesOf(tensor), bytes);
      const zeros = makeTensor(ort, { name: "x", dtype, shape: [2] });
      assert.deepEqual(await bytesOf(zeros), new Uint8Array(2 * width));
    }
  });

  it(`bfloat16 is refused on ${runtime}`, () => {
    assert.throws(() => makeTensor(ort, { name: "x", dtype: "BF16", shape: [2] }), ArtifactError);
  });
}
