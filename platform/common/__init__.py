"""Shared by all apps: settings, commands, threads, errors, outbound HTTP. No models."""
