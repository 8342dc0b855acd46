import assert from "node:assert/strict";
import { it } from "node:test";
import { crc32 } from "#inside/crc32.js";

const ascii = (text: string): Uint8Array => new TextEncoder().encode(text);

/** The definition, bit by bit. */
function bitwise(bytes: Uint8Array): number {
  let state = ~0;
  for (const byte of bytes) {
    state ^= byte;
    for (let bit = 0; bit < 8; bit++) state = (state >>> 1) ^ (state & 1 ? 0xedb88320 : 0);
  }
  return ~state >>> 0;
}

const noise = (length: number): Uint8Array =>
  Uint8Array.from({ length }, (_, i) => Math.imul(i + length, 2654435761) >>> 13);

const KNOWN: [text: string, checksum: number][] = [
  ["", 0],
  ["a", 0xe8b7be43],
  ["abc", 0x352441c2],
  ["123456789", 0xcbf43926],
  ["The quick brown fox jumps over the lazy dog", 0x414fa339],
];
for (const [text, checksum] of KNOWN) {
  it(`the checksum of "${text}" is ${checksum.toString(16)}`, () => {
    assert.equal(crc32(ascii(text)), checksum);
  });
}

it("bytes of any length, from any place of their memory, have the checksum of the definition", () => {
  for (let length = 0; length <= 100; length++) {
    for (let start = 0; start < 5; start++) {
      const bytes = noise(start + length).subarray(start);
      assert.equal(crc32(bytes), bitwise(bytes), `${length} bytes from ${start}`);
    }
  }
});

it("a file of several blocks has the checksum of the definition", () => {
  const bytes = noise((2 << 20) + 77).subarray(3);
  assert.equal(crc32(bytes), bitwise(bytes));
});

it("parts have the checksum of the whole, wherever it is cut", () => {
  const bytes = noise(100);
  for (let at = 0; at <= bytes.length; at++) {
    const part = crc32(bytes.subarray(0, at));
    assert.equal(crc32(bytes.subarray(at), part), crc32(bytes));
  }
});
