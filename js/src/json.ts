/**
 * JSON as files of other languages hold it, without what readers of JSON take differently.
 *
 * `JSON.parse` takes the last of several entries of one name without a word, and other readers the
 * first.
 */

/** Levels of arrays and objects. A header has three; a thousand of them overflow a stack somewhere. */
const MOST_LEVELS = 64;

/**
 * Parses a text.
 *
 * @throws SyntaxError: it is no JSON, names a key twice, or is nested too deeply.
 */
export function parseJson(text: string): unknown {
  entriesOf(text);
  return JSON.parse(text);
}

/**
 * The entries of an object as they are spelled: the text of each value.
 *
 * What is no JSON is not found here, but by `JSON.parse`.
 *
 * @throws SyntaxError: a key stands twice, or the text is nested too deeply.
 */
export function entriesOf(text: string): Map<string, string> {
  const entries = new Map<string, string>();
  const keys: Set<string>[] = [];
  let [string, value, key] = ["", 0, ""];
  for (let at = 0; at < text.length; at++) {
    switch (text[at]) {
      case '"': {
        const end = endOfString(text, at);
        string = text.slice(at, end);
        at = end - 1;
        break;
      }
      case "{":
      case "[":
        keys.push(new Set());
        if (keys.length > MOST_LEVELS) {
          throw new SyntaxError(`it is nested more than ${MOST_LEVELS} levels deep`);
        }
        break;
      case ":": {
        const names = keys.at(-1);
        const name = JSON.parse(string) as string;
        if (names?.has(name)) throw new SyntaxError(`it has ${string} twice`);
        names?.add(name);
        if (keys.length === 1) [key, value] = [name, at + 1];
        break;
      }
      case ",":
      case "}":
      case "]":
        if (keys.length === 1 && value > 0) {
          entries.set(key, text.slice(value, at).trim());
          value = 0;
        }
        if (text[at] !== ",") keys.pop();
        break;
    }
  }
  return entries;
}

/** Where a string that starts with a quote is over; the text's end where it has no other quote. */
function endOfString(text: string, start: number): number {
  for (let at = start + 1; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === '"') return at + 1;
  }
  return text.length;
}
