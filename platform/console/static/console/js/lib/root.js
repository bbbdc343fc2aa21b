/** Where Quire is, with a slash at the end: "/", or what `--root-path` says. */
export const ROOT = document.documentElement.dataset.root;
