"""The console's pages, a module a group."""
