"""Shares the tests out between processes that are forked once all is imported and collected."""
