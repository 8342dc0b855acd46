/** Reads a file from a server. */
export async function fetchBytes(location: string | URL): Promise<Uint8Array> {
  const response = await fetch(location);
  if (!response.ok) throw new Error(`the server answers ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}
