import assert from "node:assert/strict";
import { it } from "node:test";
import { entriesOf, parseJson } from "#inside/json.js";

const VALUES = [
  {},
  [],
  [1, [2, {}], "}"],
  { a: { b: 1 }, b: { b: 2 }, c: [{ b: 3 }, { b: 4 }] },
  { 'a "b": {': "\\", ":": ',"', "": [] },
  "text",
  -1.5e-7,
  null,
];
for (const value of VALUES) {
  it(`${JSON.stringify(value)} is read as it is, with and without blanks`, () => {
    assert.deepEqual(parseJson(JSON.stringify(value)), value);
    assert.deepEqual(parseJson(JSON.stringify(value, null, "\t")), value);
  });
}

it("__proto__ is a name like any other", () => {
  const value = parseJson('{"__proto__": {"a": 1}}') as Record<string, unknown>;
  assert.deepEqual(Object.keys(value), ["__proto__"]);
  assert.equal(value.a, undefined);
});

for (const text of [
  '{"a": 1, "a": 1}',
  '{"a": 1, "\\u0061": 2}',
  '[{"x": {"b": 1, "c": [], "b": 2}}]',
  '{"__proto__": 1, "__proto__": 2}',
]) {
  it(`${text} has a name twice`, () => {
    assert.throws(() => parseJson(text), { name: "SyntaxError", message: /twice/ });
  });
}

it("what is nested deeply is refused before a stack overflows", () => {
  for (const [open, close] of [
    ["[", "]"],
    ['{"a":', "}"],
  ] as const) {
    const text = (levels: number): string => `${open.repeat(levels)}0${close.repeat(levels)}`;
    parseJson(text(64));
    for (const levels of [65, 1e5]) {
      assert.throws(() => parseJson(text(levels)), { name: "SyntaxError", message: /64 levels/ });
      assert.throws(() => parseJson(open.repeat(levels)), { name: "SyntaxError" });
    }
  }
});

it("what is no JSON is a SyntaxError, wherever it is cut off", () => {
  const whole = '{"a": [1, {"\\"": "\\u0041"}], "b": {"c": -1.5e3}, "d": null}';
  parseJson(whole);
  for (let length = 0; length < whole.length; length++) {
    assert.throws(() => parseJson(whole.slice(0, length)), { name: "SyntaxError" });
  }
  for (const text of [":", "{:1}", '{"a":1:2}', "]", '"\\', "{]:", '{"\n": 1}']) {
    assert.throws(() => parseJson(text), { name: "SyntaxError" });
  }
});

it("entries are told as they are spelled", () => {
  const text = '{ "a": 2.0 , "b":[1, {"c": 2}],\n"1": "x,y:}" }';
  assert.deepEqual(
    [...entriesOf(text)],
    [
      ["a", "2.0"],
      ["b", '[1, {"c": 2}]'],
      ["1", '"x,y:}"'],
    ],
  );
});

it("a text of many megabytes and escapes is read", () => {
  const text = JSON.stringify({ a: "\n".repeat(4e6), b: [1] });
  assert.equal(entriesOf(text).get("b"), "[1]");
});
