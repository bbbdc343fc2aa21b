"""Date formats: `settings.FORMAT_MODULE_PATH`."""
