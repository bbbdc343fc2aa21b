/** What was dropped: files, and of a folder the files that lie in it. */

/** The files of a drop. Its entries are gone when the event is over, so they are taken at once. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.());
  const files = [...transfer.files];
  const folders = entries.filter((entry) => entry?.isDirectory);
  if (!folders.length) return files;
  const names = new Set(folders.map((folder) => folder.name));
  const inside = await Promise.all(folders.map(filesOf));
  return [...files.filter((file) => !names.has(file.name)), ...inside.flat()];
}

/** Of a folder, not of folders in it. A reader tells a part at a time, and nothing at its end. */
async function filesOf(folder) {
  const reader = folder.createReader();
  const found = [];
  for (;;) {
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) break;
    found.push(...part.filter((entry) => entry.isFile));
  }
  return Promise.all(found.map((entry) => new Promise((resolve, reject) => entry.file(resolve, reject))));
}
