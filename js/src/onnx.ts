/**
 * The metadata of an ONNX file, which onnxruntime's JavaScript API does not tell.
 *
 * A file is a message in the wire format of protocol buffers: a row of fields, each with a number and
 * a kind. Source: https://protobuf.dev/programming-guides/encoding/
 */

// Of onnx.proto: ModelProto.metadata_props, StringStringEntryProto.key and .value.
const METADATA = 14;
const KEY = 1;
const VALUE = 2;

const VARINT = 0;
const FIXED_64 = 1;
const BYTES = 2;
const FIXED_32 = 5;

/** An entry of a model's metadata; undefined where there is none, or where this is no ONNX file. */
export function metadataOf(model: Uint8Array, key: string): string | undefined {
  for (const [number, entry] of fields(model)) {
    if (number !== METADATA) continue;
    const row = new Map(fields(entry));
    if (text(row.get(KEY)) === key) return text(row.get(VALUE));
  }
  return undefined;
}

/** The fields with bytes of a message, up to where it ends or is no message. */
function* fields(message: Uint8Array): Generator<[number: number, content: Uint8Array]> {
  let at = 0;
  const varint = (): number => {
    let [value, scale, byte] = [0, 1, 128];
    while (byte >= 128 && at < message.length) {
      byte = message[at++] as number;
      value += (byte & 127) * scale;
      scale *= 128;
    }
    return value;
  };
  while (at < message.length) {
    const key = varint();
    switch (key & 7) {
      case VARINT:
        varint();
        break;
      case FIXED_64:
        at += 8;
        break;
      case FIXED_32:
        at += 4;
        break;
      case BYTES: {
        const size = varint();
        yield [Math.floor(key / 8), message.subarray(at, at + size)];
        at += size;
        break;
      }
      default:
        return;
    }
  }
}

function text(bytes: Uint8Array | undefined): string {
  return new TextDecoder().decode(bytes);
}
