import assert from "node:assert/strict";
import { it } from "node:test";
import {
  ArtifactError,
  type Dtype,
  InputError,
  type RawTensor,
  readSafetensors,
  writeSafetensors,
} from "@ortrain/web/core";

const WIDTHS: [Dtype, number][] = [
  ["BOOL", 1],
  ["I8", 1],
  ["U16", 2],
  ["F16", 2],
  ["BF16", 2],
  ["F32", 4],
  ["I64", 8],
  ["F64", 8],
];

/** A tensor of every width with three elements, the narrow ones first, and others of none and one. */
function some(): Map<string, RawTensor> {
  const tensors = new Map<string, RawTensor>();
  for (const [dtype, width] of WIDTHS) {
    const bytes = Uint8Array.from({ length: 3 * width }, (_, i) => i + width);
    tensors.set(`of ${dtype}`, { dtype, shape: [1, 3], bytes });
  }
  tensors.set("scalar", { dtype: "F32", shape: [], bytes: Uint8Array.of(0, 0, 128, 63) });
  tensors.set("empty", { dtype: "F32", shape: [0, 4], bytes: new Uint8Array() });
  return tensors;
}

/** A file with a header of our own. */
function fileOf(header: string, data = 0): Uint8Array {
  const text = new TextEncoder().encode(header);
  const file = new Uint8Array(8 + text.length + data);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  return file;
}

it("what is written is read again, whatever the dtype", () => {
  const metadata = { format: "ünicode", other: '{"a": 1}' };
  const read = readSafetensors(writeSafetensors({ metadata, tensors: some() }));
  assert.deepEqual(read.metadata, metadata);
  assert.deepEqual(new Map([...read.tensors].sort()), new Map([...some()].sort()));
});

it("each tensor starts at a multiple of its element's size", () => {
  for (let length = 0; length < 16; length++) {
    const metadata = { text: "x".repeat(length) };
    const file = writeSafetensors({ metadata, tensors: some() });
    for (const [name, { bytes, dtype }] of readSafetensors(file).tensors) {
      const width = WIDTHS.find(([d]) => d === dtype)?.[1] as number;
      assert.equal(bytes.byteOffset % width, 0, name);
    }
  }
});

it("a file that is cut off anywhere, or goes on, is refused", () => {
  const file = writeSafetensors({ metadata: {}, tensors: some() });
  for (let length = 0; length < file.length; length++) {
    assert.throws(() => readSafetensors(file.subarray(0, length), "it"), ArtifactError);
  }
  const longer = new Uint8Array(file.length + 1);
  longer.set(file);
  assert.throws(() => readSafetensors(longer), /tensors take \d+ bytes, and \d+ follow/);
});

const entry = (dtype: string, shape: string, offsets: string): string =>
  `{"x":{"dtype":${dtype},"shape":${shape},"data_offsets":${offsets}}}`;

const DEEP = `${"[".repeat(1e5)}${"]".repeat(1e5)}`;

const FAULTS: [header: string, data: number, message: RegExp][] = [
  ["[]", 0, /header is no JSON object/],
  ["{", 0, /header is no JSON object/],
  ['{"__metadata__":{"a":1}}', 0, /__metadata__ is no object of strings/],
  ["\ufeff{}", 0, /header is no JSON object/],
  ['{"x":{},"x":{}}', 0, /header is no JSON object: it has "x" twice/],
  ['{"x":{},"\\u0078":{}}', 0, /header is no JSON object: it has "\\u0078" twice/],
  ['{"__metadata__":{"a":"1","a":"2"}}', 0, /it has "a" twice/],
  ['{"__metadata__":{},"__metadata__":{}}', 0, /it has "__metadata__" twice/],
  [DEEP, 0, /more than 64 levels/],
  [`{"x":${DEEP}}`, 0, /more than 64 levels/],
  [entry(DEEP, "[1]", "[0,4]"), 4, /more than 64 levels/],
  [entry("[[]]", "[1]", "[0,4]"), 4, /says of x a dtype that is no string/],
  [entry('{"toString":1}', "[1]", "[0,4]"), 4, /says of x a dtype that is no string/],
  ['{"__proto__":1}', 0, /says of __proto__ no object/],
  [entry('"F32"', "[94906267,94906267]", "[0,4]"), 4, /more bytes than a file can have/],
  [entry('"F32"', "[9007199254740991]", "[0,4]"), 4, /more bytes than a file can have/],
  [entry('"U8"', "[9007199254740991,2,0]", "[0,0]"), 0, /more bytes than a file can have/],
  [entry('"U8"', `[${"9007199254740991,".repeat(30)}0]`, "[0,0]"), 0, /more bytes than a file/],
  ['{"x":1}', 0, /says of x no object/],
  [entry('"C64"', "[1]", "[0,8]"), 8, /says of x the dtype C64/],
  [entry('"toString"', "[1]", "[0,8]"), 8, /says of x the dtype toString/],
  [entry('"F32"', "[-1]", "[0,4]"), 4, /no list of sizes/],
  [entry('"F32"', "[1]", "[0]"), 4, /no two positions/],
  [entry('"F32"', "[2]", "[0,4]"), 4, /says of x 4 bytes where its shape takes 8/],
  [entry('"F32"', "[1]", "[4,8]"), 8, /overlap or leave gaps/],
  [entry('"F32"', "[1]", "[0,4]"), 3, /take 4 bytes, and 3 follow/],
];

for (const [header, data, message] of FAULTS) {
  it(`the header ${header.slice(0, 100)} with ${data} bytes is refused`, () => {
    assert.throws(
      () => readSafetensors(fileOf(header, data), "the file"),
      (error: Error) => {
        assert.ok(error instanceof ArtifactError);
        assert.match(error.message, /cannot read the file/);
        assert.match(error.message, message);
        return true;
      },
    );
  });
}

it("a header that claims more bytes than any file has is refused", () => {
  assert.throws(() => readSafetensors(new Uint8Array(16).fill(255)), /its header says to have/);
});

it("a name of JavaScript's own is a name like any other", () => {
  const names = ["__proto__", "constructor", "toString", "1", "0"];
  const metadata = JSON.parse('{"__proto__":"a","constructor":"b","length":"c"}');
  const tensors = new Map(
    names.map((name, i): [string, RawTensor] => {
      return [name, { dtype: "U8", shape: [1], bytes: Uint8Array.of(i) }];
    }),
  );
  const read = readSafetensors(writeSafetensors({ metadata, tensors }));
  assert.deepEqual(Object.entries(read.metadata), Object.entries(metadata));
  assert.deepEqual(new Map([...read.tensors].sort()), new Map([...tensors].sort()));
});

it("a tensor with the name of the metadata is refused", () => {
  const tensors = new Map([["__metadata__", some().get("scalar") as RawTensor]]);
  assert.throws(() => writeSafetensors({ metadata: {}, tensors }), InputError);
});

it("an empty tensor may have sizes of which one is 0 first", () => {
  const header = entry('"F32"', "[0,9007199254740991,9007199254740991]", "[0,0]");
  assert.equal(readSafetensors(fileOf(header)).tensors.size, 1);
});
