/** Quire's root path with a trailing slash: "/", or the value of `--root-path`. */
export const ROOT = document.documentElement.dataset.root;
