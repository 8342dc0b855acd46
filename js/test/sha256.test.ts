import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { it } from "node:test";
import { sha256 } from "#inside/sha256.js";

it("the hash of texts of every length around the block size is that of node:crypto", () => {
  for (let length = 0; length < 200; length++) {
    const text = "aé\u{1f600}z".repeat(length).slice(0, length);
    assert.equal(sha256(text), createHash("sha256").update(text).digest("hex"));
  }
});
