import assert from "node:assert/strict";
import { it } from "node:test";
import { ArtifactError, InputError, Properties } from "@ortrain/web/core";

it("what is not set anew is saved as it was spelled", () => {
  const json = '{"int": 2, "float": 2.0, "big": 1152921504606846977, "text": "a \\"b\\": 1"}';
  const properties = new Properties(json);
  assert.equal(String(properties), json);
  assert.deepEqual(
    [...properties],
    [
      ["int", 2],
      ["float", 2],
      ["big", 1152921504606846977n],
      ["text", 'a "b": 1'],
    ],
  );
});

it("what is set is got, before and after saving", () => {
  const values = [0, -1, 2.5, 1e21, 2 ** 60, 1e-7, Number.POSITIVE_INFINITY, 2n ** 62n, 'a "b"\n'];
  for (const value of [...values, Number.NEGATIVE_INFINITY, ""]) {
    const properties = new Properties().set("x", value);
    assert.equal(properties.get("x"), value);
    assert.equal(new Properties(String(properties)).get("x"), value);
  }
});

it("there are names, and properties can be removed", () => {
  const properties = new Properties('{"a": 1, "b": 2}').set("c", 3);
  assert.equal(properties.delete("a"), true);
  assert.deepEqual(properties.names, ["b", "c"]);
  assert.equal(properties.has("a"), false);
  assert.equal(properties.get("a"), undefined);
  assert.equal(String(properties), '{"b": 2, "c": 3}');
});

for (const value of [Number.NaN, true, null, undefined, {}]) {
  it(`${String(value)} cannot be a property`, () => {
    assert.throws(() => new Properties().set("x", value as never), InputError);
  });
}

it("names of JavaScript's own are names like any other", () => {
  const json = '{"__proto__": 1, "constructor": "a", "2": 3, "1": -0.0}';
  const properties = new Properties(json);
  assert.equal(String(properties), json);
  assert.equal(properties.get("__proto__"), 1);
  assert.equal(properties.has("toString"), false);
  assert.equal(new Properties(String(properties.set("__proto__", 5))).get("__proto__"), 5);
});

it("a property of many megabytes and escapes is read", () => {
  const text = "\n".repeat(4e6);
  assert.equal(new Properties(JSON.stringify({ text })).get("text"), text);
});

const DEEP = `${"[".repeat(1e5)}${"]".repeat(1e5)}`;
const DUPLICATES = ['{"a": 1, "a": 1}', '{"a": {"a": 1}}', '{"a": [{"a": 1}]}'];
for (const json of [DEEP, `{"a": ${DEEP}}`, '{"__proto__": {"a": 1}}', ...DUPLICATES]) {
  it(`${json.slice(0, 30)} are no properties, in one error`, () => {
    const message = /^(the properties of x are no JSON object|the property .* of x is no number)/;
    assert.throws(() => new Properties(json, "x"), { name: "ArtifactError", message });
  });
}

for (const json of ["[]", "{", "null", '{"a": true}', '{"a": {"b": 1}}', '{"a": [1]}']) {
  it(`${json} are no properties`, () => {
    assert.throws(() => new Properties(json), ArtifactError);
  });
}
