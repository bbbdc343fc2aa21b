"""How Django writes dates: `settings.FORMAT_MODULE_PATH`."""
