/** Reads dropped files, and the files directly in a dropped folder. */

/** The files of a drop. Its entries are only accessible during the event, so they are read at once. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.());
  const files = [...transfer.files];
  const folders = entries.filter((entry) => entry?.isDirectory);
  if (!folders.length) return files;
  const names = new Set(folders.map((folder) => folder.name));
  const inside = await Promise.all(folders.map(filesOf));
  return [...files.filter((file) => !names.has(file.name)), ...inside.flat()];
}

/** The files of a folder without its subfolders. The reader returns them in batches, the last one empty. */
async function filesOf(folder) {
  const reader = folder.createReader();
  const files = [];
  for (;;) {
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) break;
    files.push(...part.filter((entry) => entry.isFile));
  }
  return Promise.all(files.map((entry) => new Promise((resolve, reject) => entry.file(resolve, reject))));
}
